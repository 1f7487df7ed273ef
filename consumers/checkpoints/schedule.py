"""Decides when a checkpoint is due."""

import time
from collections.abc import Callable

MEMORY_HIGH = 0.7
"""Share of Redis' maxmemory above which a checkpoint is due, since only a commit trims the stream."""
MEMORY_COMMIT_SHARE = 0.1
"""Largest share of the time for such checkpoints if they free nothing because something else fills the memory."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
"""A failed checkpoint is retried; the delay doubles with each consecutive failure."""


class CommitSchedule:
    """A checkpoint is due every `every` updates, when Redis' memory is nearly full, and after a failed one.

    memory_share: the share of its maxmemory that Redis uses; 0 without a limit.
    """

    def __init__(
        self, memory_share: Callable[[], float], every: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory_share = memory_share
        self._every = every
        self._clock = clock
        self._for_memory = self._freed_nothing = False
        self._took_s = self._ended_at = 0.0
        self._retry_at: float | None = None
        self._next_delay_s = FIRST_RETRY_S
        self._num_settled = -1
        self.num_batches = -1
        """Updates at the last commit; -1 before the first."""

    def is_due(self, num_batches: int, num_settled: int, *, busy: bool) -> bool:
        """Returns whether a checkpoint is due. Call it while none is being written. busy: a checkpoint would delay
        training; False while the trainer waits for rollouts."""
        now = self._clock()
        self._for_memory = False
        if self._retry_at is not None:
            return now >= self._retry_at
        # One that became due while another was written is no longer on a multiple.
        if num_batches // self._every > self.num_batches // self._every and (
            self.num_batches >= 0 or num_batches % self._every == 0
        ):
            return True
        if num_settled == self._num_settled:
            return False  # nothing to trim
        if busy and self._freed_nothing and now - self._ended_at < self._took_s / MEMORY_COMMIT_SHARE:
            return False
        self._for_memory = self._memory_share() > MEMORY_HIGH
        return self._for_memory

    def committed(self, num_batches: int, num_settled: int, took_s: float) -> None:
        """Notes a commit. The counts are those of the checkpoint, which may be behind the trainer's."""
        self.num_batches = num_batches
        self._num_settled = num_settled
        self._took_s = took_s
        self._ended_at = self._clock()
        self._retry_at = None
        self._next_delay_s = FIRST_RETRY_S
        self._freed_nothing = self._for_memory and self._memory_share() > MEMORY_HIGH

    def failed(self) -> float:
        """Notes a checkpoint that could not be written; returns the seconds until the next attempt."""
        delay_s = self._next_delay_s
        self._next_delay_s = min(2 * delay_s, LONGEST_RETRY_S)
        self._retry_at = self._clock() + delay_s
        return delay_s
