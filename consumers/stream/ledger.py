"""The ledger of released indexes and how each was settled. Sets of indexes are kept as ranges."""

import copy
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise

from penstock.consumers.checkpoints.state import LedgerState, Range, ReleasedTask, RequeuedIndex
from penstock.consumers.stream.history import TaskHistory
from penstock.schemas.attrition import Attrition

OUTCOMES = ("trained", "skipped", "dead")
MAX_KINDS = 64
"""Most kinds of dead groups that the ledger distinguishes: producers name them, and every checkpoint has all."""
MAX_KIND_CHARACTERS = 64
OTHER_KIND = "other"


class RunFailedError(RuntimeError):
    """The run cannot continue; the message says why."""


class IndexRanges:
    """A set of positive integers, small while they are nearly consecutive."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._edges = [*chain(*ranges)]
        """Ascending: the start and the end of each range."""
        if any(left >= right for left, right in pairwise(self._edges)):
            raise ValueError(f"ranges: {self.ranges()}, expected ascending, disjoint, half-open ranges")

    @classmethod
    def union(cls, sets: Iterable["IndexRanges"]) -> "IndexRanges":
        """Returns the union of disjoint sets."""
        union = cls()
        # Where two ranges touch, the end of one and the start of the other are the same edge.
        edges = Counter(edge for each in sets for edge in each._edges)
        union._edges = sorted(edge for edge, num in edges.items() if num == 1)
        return union

    def add(self, index: int) -> bool:
        """Adds `index`; returns False if it was present."""
        if index in self:
            return False
        self._toggle(index)
        return True

    def discard(self, index: int) -> bool:
        """Removes `index`; returns False if it was absent."""
        if index not in self:
            return False
        self._toggle(index)
        return True

    def _toggle(self, index: int) -> None:
        for edge in (index, index + 1):
            at = bisect_left(self._edges, edge)
            if self._edges[at : at + 1] == [edge]:
                del self._edges[at]
            else:
                self._edges.insert(at, edge)

    def __contains__(self, index: int) -> bool:
        return bisect_right(self._edges, index) % 2 == 1

    def __len__(self) -> int:
        return sum(self._edges[1::2]) - sum(self._edges[::2])

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(*each) for each in self.ranges())

    def ranges(self) -> list[Range]:
        return list(zip(self._edges[::2], self._edges[1::2], strict=True))

    def missing(self, last: int) -> Iterator[int]:
        """Yields the integers from 1 to `last` that are not in the set."""
        gaps = zip([1, *self._edges[1::2]], [*self._edges[::2], last + 1], strict=True)
        return chain.from_iterable(range(start, min(end, last + 1)) for start, end in gaps)

    def num_above(self, index: int) -> int:
        """Returns the number of members above `index`."""
        at = bisect_right(self._edges, index + 1)
        edges = [index + 1] * (at % 2) + self._edges[at:]
        return sum(edges[1::2]) - sum(edges[::2])

    @property
    def highest(self) -> int:
        return self._edges[-1] - 1 if self._edges else 0


class Ledger:
    """Settles every released index exactly once: as trained, skipped or dead.

    A dead index is opened again when an operator requeues its letter. `requeued` remembers the letter, so that one
    request opens an index once, and again only if a rollback has undone it.
    """

    def __init__(self) -> None:
        self.settled = IndexRanges()
        self.by_outcome = {outcome: IndexRanges() for outcome in OUTCOMES}
        self.dead_by_reason: dict[str, IndexRanges] = {}
        """By kind: the reason up to its first colon."""
        self.released_again: Counter[str] = Counter()
        self.requeued: dict[int, RequeuedIndex] = {}
        self.postponed: dict[int, str] = {}
        """Reason by released, unsettled index without prompt or group, to be released again as the credit lasts."""
        self.num_duplicates_dropped = 0
        """Groups of an index for which another group arrived first."""
        self.last_read = "0-0"
        """The last entry read: an entry that is read again, after a resume for example, is no duplicate."""
        self.num_released = 0
        """The release cursor: indexes 1 to this were released."""
        self.tasks: dict[int, ReleasedTask] = {}
        """Tasks of released indexes that are open or dead: they keep them even if the run file changes."""
        self.histories: defaultdict[str, TaskHistory] = defaultdict(TaskHistory)
        """By environment."""
        self.attrition = Attrition()
        self.stale: dict[int, str] = {}
        """By open index, the last entry that was counted as stale or quarantined: a resume reads it again."""
        self._released_again_after: dict[int, int] = {}
        """By open index, the release cursor when it was last released again. A resume forgets it."""

    def release(self, task: ReleasedTask) -> None:
        """Records the release of the next index."""
        self.num_released += 1
        self.tasks[self.num_released] = task
        self.histories[task.environment].release(task.number)

    def release_again(self, index: int, reason: str) -> None:
        """Records that an open index is released again, after all others."""
        self.released_again[reason] += 1
        self._released_again_after[index] = self.num_released

    def turn(self, index: int) -> tuple[int, int]:
        """Returns the place of a released index in the order of releases: the release cursor first."""
        after = self._released_again_after.get(index)
        return (index, 0) if after is None else (after, index)

    def open_indexes(self) -> Iterator[int]:
        """Yields the released indexes that are not settled, ascending."""
        return self.settled.missing(self.num_released)

    def settle(
        self, index: int, outcome: str, reason: str = "", rewards: Sequence[float] = (), *, flat: bool = False
    ) -> None:
        """Settles `index`. rewards: of its rollouts, unless it is dead. flat: see `TaskHistory`.

        Raises:
            ValueError: it is already settled.
        """
        if not self.settled.add(index):
            raise ValueError(f"index {index} is settled already; it cannot also be {outcome}")
        self.stale.pop(index, None)
        self._released_again_after.pop(index, None)
        self.by_outcome[outcome].add(index)
        if (task := self.tasks.get(index)) is not None:
            self.histories[task.environment].settle(task.number, rewards, flat=flat)
        if outcome != "dead":
            self.tasks.pop(index, None)
        else:
            self.dead_by_reason.setdefault(self._kind(reason), IndexRanges()).add(index)

    def may_reopen(self, index: int, letter: str) -> bool:
        """Returns whether `index` is dead and was not already opened again for this letter."""
        known = self.requeued.get(index)
        return index in self.by_outcome["dead"] and (known is None or known.letter != letter)

    def reopen(self, index: int, letter: str, after: str) -> None:
        """Opens a dead index again. Its stream entries up to `after` are void.

        Raises:
            ValueError: it is not dead.
        """
        if not self.by_outcome["dead"].discard(index):
            raise ValueError(f"index {index} is not dead; it cannot be opened again")
        self.settled.discard(index)
        if (task := self.tasks.get(index)) is not None:
            self.histories[task.environment].reopen(task.number)
        for reason, indexes in list(self.dead_by_reason.items()):
            if indexes.discard(index) and not indexes:
                del self.dead_by_reason[reason]
        self.requeued[index] = RequeuedIndex(letter, after)

    def count(self, outcome: str) -> int:
        return len(self.by_outcome[outcome])

    @property
    def dead_reasons(self) -> dict[str, int]:
        """Number of dead indexes by kind, the reason up to its first colon; `other` once there are too many kinds."""
        return {reason: len(indexes) for reason, indexes in self.dead_by_reason.items()}

    def _kind(self, reason: str) -> str:
        kind = reason.partition(":")[0][:MAX_KIND_CHARACTERS]
        is_known = kind in self.dead_by_reason
        return kind if is_known or len(self.dead_by_reason) < MAX_KINDS - 1 else OTHER_KIND

    @property
    def num_open(self) -> int:
        """Released and not settled: what the credit bounds."""
        return self.num_released - len(self.settled)

    def to_state(self) -> LedgerState:
        return LedgerState(
            **{outcome: self.by_outcome[outcome].ranges() for outcome in OUTCOMES},
            dead_by_reason={reason: indexes.ranges() for reason, indexes in self.dead_by_reason.items()},
            released_again=dict(self.released_again),
            requeued=dict(self.requeued),
            postponed=sorted(self.postponed),
            num_duplicates_dropped=self.num_duplicates_dropped,
            last_read=self.last_read,
            num_released=self.num_released,
            tasks=dict(self.tasks),
            histories={name: history.to_state() for name, history in self.histories.items()},
            attrition=copy.deepcopy(self.attrition),
            stale=dict(self.stale),
        )

    @classmethod
    def from_state(cls, state: LedgerState) -> "Ledger":
        ledger = cls()
        ledger.by_outcome = {outcome: IndexRanges(getattr(state, outcome)) for outcome in OUTCOMES}
        ledger.settled = IndexRanges.union(ledger.by_outcome.values())
        ledger.dead_by_reason = {reason: IndexRanges(ranges) for reason, ranges in state.dead_by_reason.items()}
        ledger.released_again.update(state.released_again)
        ledger.requeued = dict(state.requeued)
        ledger.num_duplicates_dropped = state.num_duplicates_dropped
        ledger.last_read = state.last_read
        ledger.num_released = state.num_released
        ledger.tasks = dict(state.tasks)
        ledger.histories.update({name: TaskHistory.from_state(saved) for name, saved in state.histories.items()})
        ledger.attrition = copy.deepcopy(state.attrition)
        ledger.stale = dict(state.stale)
        return ledger
