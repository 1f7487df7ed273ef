"""Recovery from data loss in Redis: it was emptied, restarted with an older state, or replaced by a replica."""

import logging
from collections.abc import Callable

from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership

log = logging.getLogger(__name__)

SUSPICIOUS_S = 300.0
"""After waiting this long, the policy's chunks are read back: it may be impossible to load."""


class Recovery:
    """Restores the commit hash and the newest manifest, and releases lost work again.

    announce_again: see `penstock.consumers.weights.publisher.Publisher`.
    """

    def __init__(
        self, leadership: Leadership, intake: Intake, evaluator: Evaluator, announce_again: Callable[..., None]
    ) -> None:
        self._leadership = leadership
        self._intake = intake
        self._evaluator = evaluator
        self._announce_again = announce_again

    def check(self) -> None:
        """Detects a loss and recovers from it.

        Raises:
            FencedError: a newer trainer has the run.
        """
        self._leadership.check()
        restarted = self._leadership.scripts.connection.restarted()
        if restarted:
            log.warning("redis is another process now: reading the stream from its start and reconciling")
            self._leadership.restore()
        if self._leadership.has_restored() or restarted:
            self._announce_again()
            self._intake.reader.rewind()
            self._evaluator.request_again()
            self._intake.reconcile()
            self._intake.quarantine.note_again()

    def look_for_losses(self, waited_s: float) -> None:
        """Recovers from undetected losses: by a Redis that is still the same process, or by a chunk store. Call it from
        time to time while nothing arrives. waited_s: for how long nothing has."""
        self._announce_again(thoroughly=waited_s >= SUSPICIOUS_S)
        self._intake.reconcile()
