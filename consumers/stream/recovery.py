"""Recovery from what Redis loses: it was emptied, restarted with an older state, or replaced by a replica."""

import logging
from collections.abc import Callable

from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership

log = logging.getLogger(__name__)

SUSPICIOUS_S = 300.0
"""After waiting for so long the chunks of the policy are read back: nobody might be able to load it."""


class Recovery:
    """Restores the commit hash and the newest manifest, and has lost work done again.

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
        """Notices a loss and recovers from it.

        Raises:
            FencedError: a newer trainer has the run.
        """
        self._leadership.check()
        connection = self._leadership.connection
        restarted = connection.restarted()
        if restarted:
            log.warning("redis is another process now: reading the stream from its start and reconciling")
            connection.call(lambda _: self._leadership.restore())
        if self._leadership.has_restored() or restarted:
            self._announce_again()
            self._intake.reader.rewind()
            self._evaluator.request_again()
            self._intake.reconcile()
            self._intake.quarantine.note_again()

    def look_around(self, waited_s: float) -> None:
        """Has done again what was lost without a sign: by a Redis that is the same process as before, or by a chunk
        store. To be called now and then while nothing arrives, as for `waited_s` by now."""
        self._announce_again(thoroughly=waited_s >= SUSPICIOUS_S)
        self._intake.reconcile()
        self._intake.quarantine.look_around()
