"""The order in which batches take groups: that of their release, within a window."""

from collections.abc import Collection
from itertools import islice

from penstock.consumers.stream.ledger import Ledger
from penstock.schemas.config import RunConfig


class Window:
    """A batch takes the ready groups that were released first. A group that is still being sampled is passed by at most
    `RunConfig.num_passing` of those released after it (a windowed FIFO: MiniMax, arXiv 2605.26494, section 6.2.4); then
    batches wait for it.

    So what takes long is never overtaken until it is stale, and what was sampled is trained whatever its length. The
    group that batches wait for arrives, dies (of its deadline, for example), or is found lost and released again behind
    the others, as one that is sampled again is: none is waited for forever.
    """

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._num_passing = config.num_passing
        self._ledger = ledger
        # A group that is skipped while a batch is filled takes none of its places.
        self._taken = ("trained",) if config.max_skipped else ("trained", "skipped")

    def oldest_away(self, ready: Collection[int]) -> int | None:
        """Returns the index that was released first of those that are being sampled."""
        ledger = self._ledger
        away = (index for index in ledger.open_indexes() if index not in ready and index not in ledger.postponed)
        return min(away, key=ledger.turn, default=None)

    def in_turn(self, ready: Collection[int]) -> list[int]:
        """Returns the ready indexes that may be taken now, in the order of their release."""
        order = sorted(ready, key=self._ledger.turn)
        oldest = self.oldest_away(ready)
        if oldest is None:
            return order
        turn = self._ledger.turn(oldest)
        before = [index for index in order if self._ledger.turn(index) < turn]
        num_passed = sum(self._ledger.by_outcome[outcome].num_above(turn[0]) for outcome in self._taken)
        return [*before, *islice(order, len(before), len(before) + max(0, self._num_passing - num_passed))]
