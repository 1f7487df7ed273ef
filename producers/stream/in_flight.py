"""The in-flight table: every claim until its group is appended, and the room that is left."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec import UNSET

from penstock.schemas.keys import entry_key
from penstock.schemas.process import clock
from penstock.schemas.rollout import RolloutGroup, Timings, shown_error
from penstock.schemas.spans import Span

SHARE = 4
"""A read claims at most one in `SHARE` of the free groups, so that several idle producers share the prompts."""


class GroupInFlight(Protocol):
    """The group that this producer samples for a claim."""

    def so_far(self) -> RolloutGroup | None:
        """Returns the group as far as its siblings are sampled; None while nothing is, or it is unknown."""


@dataclass(slots=True, eq=False, kw_only=True)
class Claim:
    """One claimed stream entry.

    stream: name of the stream it was claimed from.
    index: the task index; of an evaluation, the number of the held-out prompt.
    environment, task: the name of the environment (the first one if empty) and the number of its task.
    version: the policy version announced when it was released.
    run_id: of the run that released it, see `penstock.schemas.keys.Commit`; empty if the entry does not say.
    attempt: how often it was delivered, this time included. Being handed back is no attempt, and deliveries before a
        holder whose progress grew for long do not count.
    num_handed_back: how often it was handed back by a producer that had begun to sample.
    attempt_released: `attempt` of the claim that this entry replaced, less one; 0 for a first entry.
    evaluation_id: `<version>-<n>`; None for a training prompt.
    """

    stream: str
    entry_id: bytes
    index: int
    version: int
    run_id: str = ""
    attempt: int = 1
    attempt_released: int = 0
    evaluation_id: str | None = None
    environment: str = ""
    task: int = 0
    num_handed_back: int = 0
    claimed_s: float = field(default_factory=clock.steady_s)
    generating_since: float | None = None
    """In the event loop's time; None while it waits for its turn or for weights."""
    in_flight: GroupInFlight | None = None
    """The group that is sampled for it in one turn; None while none is."""
    past_lag: tuple[RolloutGroup, float] | None = None
    """The group as it was when it was given up for its lag, and that lag in optimizer steps."""
    deadline: asyncio.Timeout | None = None
    """Ends its sampling and scoring."""
    converses: bool = False
    """Its siblings are conversations, which keep a journal."""
    has_progress: bool = False
    """Redis may hold its progress, which is dropped with the claim."""
    num_lost_before: int | None = None
    """Tries lost before this holder's, or before the one that it continues; None: counted from attempts and returns."""
    sampled_by: tuple[str, ...] = ()
    """The instances of the producers whose tokens this holder continues."""
    has_proved: bool = False
    """Its progress has grown for so long that it cannot be what kills producers: no attempt so far counts any more."""
    has_begun: bool = False
    """Something may have been sampled for it."""
    spans: list[Span] = field(default_factory=list)
    """What was done for it, for its trace; a span without a parent is part of the sampling."""

    def __post_init__(self) -> None:
        self.task = self.task or self.index

    @property
    def num_attempts_before(self) -> int:
        """The attempts that count, without this one."""
        return 0 if self.has_proved else self.attempt - 1

    @property
    def num_tries_lost(self) -> int:
        """Earlier tries that ended with their producer and were not continued."""
        return self.attempt - 1 + self.num_handed_back if self.num_lost_before is None else self.num_lost_before

    @property
    def released_s(self) -> float:
        """When the prompt was released, by Redis' clock, and not after its claim by this one."""
        return min(entry_key(self.entry_id)[0] / 1000, self.claimed_s)

    def timings(self, generated_s: float) -> Timings:
        """Returns the times of its group, which ends now."""
        return Timings(
            claimed_s=self.claimed_s,
            generated_s=generated_s,
            appended_s=clock.steady_s(),
            released_s=UNSET if self.evaluation_id else self.released_s,
        )

    def __str__(self) -> str:
        return f"group {self.index}" if self.evaluation_id is None else f"evaluation {self.evaluation_id}"


class Dead(NamedTuple):
    """The outcome of a claim whose group failed, and the reason.

    error: raised by a user's code, with its traceback.
    group: as far as it was sampled: it may lack rollouts, and their rewards are NaN.
    """

    reason: str
    error: BaseException | None = None
    group: RolloutGroup | None = None

    @classmethod
    def of(cls, kind: str, error: BaseException, group: RolloutGroup | None = None) -> "Dead":
        """Returns the outcome for an error of a user's code. kind: its source, as in `prompt: KeyError: 'a'`."""
        return cls(f"{kind}: {shown_error(error)}", error, group)


class DeadRollout(NamedTuple):
    """An agent's rollout that is missing from its group, the reason, and the error of the user's code behind it."""

    id: str
    reason: str
    error: BaseException | None = None


class InFlightTable:
    """Claims by stream and entry id. Room is counted in sequences: siblings of a group, the answers of an evaluation.

    num_samples: the most answers to a held-out prompt.
    """

    def __init__(self, *, num_groups: int, group_size: int, num_samples: int = 1) -> None:
        self._num_groups = num_groups
        self._group_size = group_size
        self._num_samples = num_samples
        self._claims: dict[tuple[str, bytes], Claim] = {}
        self._sequences_free = num_groups * group_size
        self._changed = asyncio.Event()
        self.marking = asyncio.Lock()
        """Held while Redis is told which claims are alive or free: a refresh that arrives after the hand-back of the
        same claim would undo it."""

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(list(self._claims.values()))

    def __contains__(self, key: tuple[str, bytes]) -> bool:
        return key in self._claims

    @property
    def sequences_free(self) -> int:
        return max(0, self._sequences_free)

    @property
    def groups_free(self) -> int:
        return self.sequences_free // self._group_size

    @property
    def most_prompts(self) -> int:
        """The most prompts that one read claims."""
        return max(1, math.ceil(self.groups_free / SHARE))

    @property
    def most_evaluations(self) -> int:
        """The most held-out prompts that one read claims."""
        return max(1, self.sequences_free // self._num_samples)

    def add(self, claim: Claim) -> None:
        self._claims[claim.stream, claim.entry_id] = claim
        self._sequences_free -= self._sequences(claim)

    def remove(self, claim: Claim) -> None:
        claim.in_flight = None  # a claim that is kept must not keep its group alive
        if self._claims.pop((claim.stream, claim.entry_id), None) is not None:
            self._sequences_free += self._sequences(claim)
            self._changed.set()

    async def wait_for_room(self, num_groups: int = 1) -> None:
        """Waits until `num_groups` more fit; an append unblocks it."""
        while self.groups_free < num_groups:
            self._changed.clear()
            await self._changed.wait()

    def _sequences(self, claim: Claim) -> int:
        return self._group_size if claim.evaluation_id is None else self._num_samples
