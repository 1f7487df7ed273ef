"""Recovery from what Redis loses: it was emptied, restarted with an older state, or replaced by a replica."""

import logging
from collections.abc import Callable

from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership

log = logging.getLogger(__name__)


class Recovery:
    """Restores the commit hash and the newest manifest, and has lost work done again.

    announce_again: puts the newest manifest onto the policy stream, unless it is the newest there.
    """

    def __init__(
        self, leadership: Leadership, intake: Intake, evaluator: Evaluator, announce_again: Callable[[], None]
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
