"""What a rollout leaves to the producer that continues it: its calls, finished and running, and its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from penstock.producers.endpoint.call_ledger import Call, digest
from penstock.producers.interfaces import Completion
from penstock.producers.rollout.sampling import Siblings
from penstock.producers.stream.in_flight import ProgressPart
from penstock.schemas.rollout import Rollout, pack_ids

Json = dict[str, Any]

encode = msgspec.msgpack.Encoder().encode


class KeptCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call, for another producer.

    number: its place in the order in which the rollout's calls began.
    prompt: digest of the ids that the engine was given.
    request, context, chain, reply: see `Call`; only of an answered one.
    base: number of the call that it continues; -1 without one.
    is_answered: False for one that was running: `completion` is what it had sampled.
    """

    number: int
    prompt: bytes
    completion: Completion
    request: bytes
    is_answered: bool = False
    base: int = -1
    context: bytes = b""
    chain: bytes = b""
    reply: Json = {}


class KeptRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout without its calls.

    unread: see `CallLedger`. reason: why it died.
    finished: with its reward.
    """

    id: str
    unread: tuple[int, ...] = ()
    reason: str = ""
    is_abandoned: bool = False
    finished: Rollout | None = None


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call between its rendering and its record."""

    number: int
    prompt_ids: list[int]
    request: bytes
    siblings: Siblings


@dataclass(slots=True, eq=False)
class Recorded:
    """The calls of an earlier holder, for repeated requests: each is answered once as it was answered before, and one
    that was running is continued.

    left: those that are in no ledger, by their number among them, until they are answered here.
    waiting: those that no request has taken yet, the oldest first.
    """

    left: dict[int, KeptCall] = field(default_factory=dict)
    waiting: list[KeptCall] = field(default_factory=list)

    def add(self, call: KeptCall, *, in_ledger: bool) -> None:
        self.waiting.append(call)
        if not in_ledger:
            self.left[len(self.left)] = call

    def take(self, request: bytes, prompt_ids: Sequence[int]) -> KeptCall | None:
        """Removes and returns the oldest call of this request, if the engine was given the same ids for it."""
        found = next((call for call in self.waiting if call.request == request), None) if request else None
        if found is None or found.prompt != digest(pack_ids(prompt_ids)):
            return None
        self.waiting.remove(found)
        return found

    def put_back(self, call: KeptCall) -> None:
        """Puts back one that was taken and not answered."""
        self.waiting.insert(0, call)

    def answered(self, call: KeptCall) -> None:
        """Forgets one that was taken and is in the ledger now."""
        self.left = {place: one for place, one in self.left.items() if one is not call}


def answered_part(name: str, call: Call) -> ProgressPart:
    return ProgressPart(name, None, call.num_sampled, partial(_answered, call))


def running_part(name: str, call: RunningCall, *, grows: bool) -> ProgressPart:
    """grows: False leaves it as it was last written, as does a call without a token."""
    found = call.siblings.so_far() if grows else None
    if not found or not (num_tokens := found[0].num_tokens):
        return ProgressPart(name)
    return ProgressPart(name, num_tokens, num_tokens, partial(_running, call, found[0]))


def _answered(call: Call) -> bytes:
    return encode(
        KeptCall(
            number=call.number,
            prompt=digest(call.prompt),
            completion=call.completion,
            request=call.request,
            is_answered=True,
            base=-1 if call.base is None else call.base.number,
            context=call.context,
            chain=call.chain,
            reply=call.reply,
        )
    )


def _running(call: RunningCall, completion: Completion) -> bytes:
    prompt = digest(pack_ids(call.prompt_ids))
    return encode(KeptCall(number=call.number, prompt=prompt, completion=completion, request=call.request))
