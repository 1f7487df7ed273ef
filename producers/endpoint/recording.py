"""What a rollout leaves to the producer that continues it: its calls, finished and running, and its end."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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

ANSWERED = "answered"
"""The mark of an answered call; that of a running one is its number of tokens."""
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
    """

    left: dict[int, KeptCall] = field(default_factory=dict)
    _by_request: dict[bytes, deque[KeptCall]] = field(default_factory=dict)

    def add(self, call: KeptCall, *, in_ledger: bool) -> None:
        self._by_request.setdefault(call.request, deque()).append(call)
        if not in_ledger:
            self.left[len(self.left)] = call

    def take(self, request: bytes, prompt_ids: Sequence[int]) -> KeptCall | None:
        """Removes and returns the oldest call of this request, if the engine was given the same ids for it."""
        calls = self._by_request.get(request)
        if not request or not calls or calls[0].prompt != digest(pack_ids(prompt_ids)):
            return None
        found = calls.popleft()
        if not calls:
            del self._by_request[request]
        return found

    def put_back(self, call: KeptCall) -> None:
        """Puts back one that was taken and not answered."""
        self._by_request.setdefault(call.request, deque()).appendleft(call)

    def answered(self, call: KeptCall) -> None:
        """Forgets one that was taken and is in the ledger now."""
        self.left = {place: one for place, one in self.left.items() if one is not call}

    def __len__(self) -> int:
        return sum(map(len, self._by_request.values()))


def call_parts(
    prefix: str, kept: Mapping[str, Hashable], answered: Sequence[Call], running: Iterable[RunningCall]
) -> Iterator[ProgressPart]:
    """Yields the parts of a rollout's calls that have changed since `kept`; of the running ones those that have sampled
    a token. Answered ones are kept in their order: all before a kept one are kept."""
    for call in reversed(answered):
        if kept.get(name := f"{prefix}{call.number}") is ANSWERED:
            break
        yield ProgressPart(name, ANSWERED, call.num_sampled, partial(_answered, call))
    for one in running:
        name = f"{prefix}{one.number}"
        found = one.siblings.so_far()
        if found and (num_tokens := found[0].num_tokens) and kept.get(name) != num_tokens:
            yield ProgressPart(name, num_tokens, num_tokens, partial(_running, one, found[0]))


def left_parts(prefix: str, kept: Mapping[str, Hashable], left: Mapping[int, KeptCall]) -> Iterator[ProgressPart]:
    """Yields the parts of an earlier holder's calls that are left for the next one, if changed since `kept`."""
    names = {f"{prefix}{place}": call for place, call in left.items()}
    yield from (ProgressPart(name) for name in kept if name.startswith(prefix) and name not in names)
    for name, call in names.items():
        if name not in kept:
            yield ProgressPart(name, ANSWERED, call.completion.num_tokens, partial(encode, call))


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
