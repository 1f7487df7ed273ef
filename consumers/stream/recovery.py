"""Recovery from data loss in Redis: it was emptied, restarted with an older state, or replaced by a replica, or the
entry ids of a stream are used up."""

import logging
import time
from collections.abc import Callable

from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership
from penstock.consumers.stream.quarantine import live_heartbeats
from penstock.schemas.rollout import one_line

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""How often the producers' heartbeats are read."""
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
        self._looked_at = 0.0
        self._compared: set[tuple[str, int]] = set()
        """The policies whose chunks were compared, each with the producer that could not read them."""

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
        # All three are asked: each is true once.
        if any([self._leadership.has_restored(), self._leadership.scripts.has_renewed(), restarted]):
            self._announce_again()
            self._intake.reader.rewind()
            self._evaluator.request_again()
            self._intake.reconcile()
            self._intake.quarantine.note_again()
        elif time.monotonic() - self._looked_at >= LOOK_S:
            self._look_at_producers()

    def _look_at_producers(self) -> None:
        """Reads the chunks of the newest policy back if a producer cannot read them, once for each start of one."""
        for beat in live_heartbeats(self._leadership.scripts):
            if beat.run_id in ("", self._leadership.scripts.run_id) and beat.unreadable_version == self._version:
                self._compare(
                    beat.instance, f"producer {one_line(beat.producer_id)} cannot read policy {self._version}"
                )
        self._looked_at = time.monotonic()

    def _compare(self, instance: str, why: str) -> bool:
        """Compares the newest policy's chunks, and writes it anew if they are wrong, unless that was done before."""
        if (instance, self._version) in self._compared:
            return False
        self._compared = {done for done in self._compared if done[1] == self._version} | {(instance, self._version)}
        log.warning("%s: its chunks are read back", why)
        self._announce_again(thoroughly=True)
        return True

    @property
    def _version(self) -> int:
        return self._intake.lag_of.current

    def look_for_losses(self, waited_s: float) -> None:
        """Recovers from undetected losses: by a Redis that is still the same process, or by a chunk store. Call it from
        time to time while nothing arrives. waited_s: for how long nothing has."""
        self._leadership.scripts.renew()
        if waited_s < SUSPICIOUS_S or not self._compare("", f"nothing has arrived for {waited_s:.0f} s"):
            self._announce_again()
        self._intake.reconcile()
