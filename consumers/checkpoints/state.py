"""The counts that a checkpoint holds beside model and optimizer: the ledger's, and those of the run's progress."""

from typing import Any, NamedTuple

import msgspec

from penstock.schemas.attrition import Attrition
from penstock.schemas.rollout import RolloutGroup

Range = tuple[int, int]
"""Indexes from the first to before the second."""


class RequeuedIndex(NamedTuple):
    """A dead letter that an operator has requeued and whose index the trainer has released again."""

    letter: str
    """Entry id of the letter. The index may die again and leave another letter."""
    after: str
    """The last entry of the rollout stream when the index was opened again: the dead group is at or before it."""


class ReleasedTask(NamedTuple):
    """The task of an index: its environment, and its number there, from 1."""

    environment: str
    number: int


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger in a checkpoint; by default, that of a run before its first. Ranges of indexes are half-open."""

    trained: list[Range] = []
    skipped: list[Range] = []
    dead: list[Range] = []
    dead_by_reason: dict[str, list[Range]] = {}
    released_again: dict[str, int] = {}
    requeued: dict[int, RequeuedIndex] = {}
    postponed: list[int] = []
    """For other readers: a resume finds these indexes itself."""
    num_duplicates_dropped: int = 0
    last_read: str = "0-0"
    num_released: int = 0
    tasks: dict[int, ReleasedTask] = {}
    histories: dict[str, dict[str, Any]] = {}
    attrition: Attrition = msgspec.field(default_factory=Attrition)
    stale: dict[int, str] = {}


class PassedOver(msgspec.Struct):
    """Groups that a batch skipped while it was filled, and their sampled tokens."""

    num_groups: dict[str, int] = {}
    """By environment."""
    num_tokens: int = 0

    @property
    def count(self) -> int:
        return sum(self.num_groups.values())

    def add(self, group: RolloutGroup) -> None:
        self.num_groups[group.environment] = self.num_groups.get(group.environment, 0) + 1
        self.num_tokens += sum(rollout.num_sampled_tokens for rollout in group.rollouts)


class BestFigure(msgspec.Struct, frozen=True):
    """The best value of a figure of evaluations, and the number of evaluations since that were no better; `update`: of
    the last one that was counted."""

    figure: str = ""
    value: float | None = None
    num_since: int = 0
    update: int = -1

    def after(self, figure: str, value: float, update: int) -> "BestFigure":
        """Returns what it is after another evaluation. One that was counted, as when a run is resumed from its update,
        changes nothing."""
        if figure != self.figure or self.value is None:
            return BestFigure(figure, value, 0, update)
        if update <= self.update:
            return self
        if value > self.value:
            return BestFigure(figure, value, 0, update)
        return BestFigure(figure, self.value, self.num_since + 1, update)


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a trainer continues from, in addition to model and optimizer. The defaults are those of a run that
    has trained nothing yet; its `policy_version` is the parent of the first policy.
    """

    policy_version: int
    num_batches: int = 0
    ledger: LedgerState = LedgerState()
    forks: dict[int, int] = {}
    announced: dict[int, int] = {}
    counters: dict[str, int | float] = {}
    """Running totals of the whole run: tokens and seconds."""
    learner: dict[str, Any] = {}
    """`Learner.state`."""
    rng: dict[str, Any] = {}
    """State of Python's and NumPy's global random generators; the learner's own is in `learner`."""
    taken: dict[int, int] = {}
    """For each epoch on the way here, the batches taken in the whole run when it ended: the positions at which the
    record of rollouts is cut."""
    passed: PassedOver = msgspec.field(default_factory=PassedOver)
    """Skipped by the batch that was being filled."""
    skipped_share: float = 0.0
    """Share of the groups read for the last batches; it increases the credit."""
    best: BestFigure = BestFigure()
    """As far as `evaluation.patience` asks."""
