"""What agents' rollouts enter in their group's journal, for the producer that continues them."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.producers.interfaces import Completion
from penstock.producers.rollout.sampling import Siblings
from penstock.schemas.images import ImagePlace
from penstock.schemas.prompt import Reward

Json = dict[str, Any]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The first entry. group: encoded, without rollouts."""

    group: bytes


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The next rollout of the group."""

    id: str


class Unread(msgspec.Struct, frozen=True, tag=True):
    """The answer of the call `number` counts as unread. rollout: its place in the group, as in all entries."""

    rollout: int
    number: int


class KeptCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One call: what it has sampled since its last entry, and with `is_answered` its answer.

    number: its place in the order in which the rollout's calls began, at whichever producer.
    prompt: digest of the ids that the engine was given.
    completion: the tokens from `start` on; those before are in earlier entries.
    replaces: number of the call of an earlier holder whose answer it gives again, or goes on with; -1 without one.
    base: number of the call that it continues; -1 without one.
    request, context, chain, reply, began_s, ended_s, images, files: see `Call`; all but the first only of an answered
        one, and files that no earlier call of its rollout had.
    """

    rollout: int
    number: int
    prompt: bytes
    completion: Completion
    request: bytes
    start: int = 0
    replaces: int = -1
    is_answered: bool = False
    base: int = -1
    context: bytes = b""
    chain: bytes = b""
    reply: Json = {}
    began_s: float = 0.0
    ended_s: float = 0.0
    images: tuple[ImagePlace, ...] = ()
    files: dict[str, bytes] = {}


class Acted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An action of a conversation, see `penstock.producers.interfaces.Conversation.act`.

    result: what it has returned, as MessagePack. state: the conversation's afterwards; None for the same as before.
    """

    rollout: int
    result: bytes
    state: bytes | None = None


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a rollout.

    reward: of a finished one; None for one that died of `reason`.
    calls, read, untrained: numbers of the calls in a finished one's ledger, of those whose answers were read, and of
        those that are not trained.
    """

    rollout: int
    reward: Reward | None = None
    calls: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    untrained: tuple[int, ...] = ()
    reason: str = ""
    is_abandoned: bool = False


Entry = Begun | Opened | Unread | KeptCall | Acted | Ended
decode = msgspec.msgpack.Decoder(Entry).decode
encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call between its rendering and its record.

    request: what identifies it; empty if nothing does.
    earlier: the call of an earlier holder that it goes on with.
    """

    number: int
    prompt: bytes
    """Digest of the ids that the engine was given."""
    request: bytes
    siblings: Siblings
    earlier: KeptCall | None = None
    num_entered: int = field(init=False)
    """Tokens of it in the journal."""

    def __post_init__(self) -> None:
        self.num_entered = 0 if self.earlier is None else self.earlier.completion.num_tokens

    def entry(self, rollout: int, completion: Completion, **answer: Any) -> KeptCall:
        """Returns what the call has sampled since its last entry. answer: further fields of an answered one."""
        start = min(self.num_entered, completion.num_tokens)  # it may have ended at an earlier stop string
        self.num_entered = completion.num_tokens
        return KeptCall(
            rollout=rollout,
            number=self.number,
            prompt=self.prompt,
            completion=completion.part(start, completion.num_tokens),
            request=self.request,
            start=start,
            replaces=-1 if self.earlier is None else self.earlier.number,
            **answer,
        )
