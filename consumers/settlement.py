"""Settles indexes in the books, with a dead letter for each one that died."""

import logging
from collections.abc import Callable

from consumers.advantages import has_variance
from consumers.ledger import Ledger
from consumers.metrics import TrainerMetrics
from consumers.reader import Refused
from schemas.rollout import RolloutGroup

log = logging.getLogger(__name__)

SendLetter = Callable[[int | None, str, bytes, bytes], None]


MAX_FAILED_STEPS_IN_A_ROW = 8


class RunFailedError(RuntimeError):
    """The run cannot go on; the message says why."""


class Settlement:
    """Books what became of groups. The letter goes first: a crash in between repeats it, which changes nothing.

    send_letter: (index or None, reason, payload, id of the rollout entry), onto the dead-letter stream.
    """

    def __init__(
        self, ledger: Ledger, metrics: TrainerMetrics, max_dead_in_a_row: int, send_letter: SendLetter
    ) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._max_dead_in_a_row = max_dead_in_a_row
        self._dead_in_a_row = 0
        self._failed_steps_in_a_row = 0
        self._num_received = 0
        self._send_letter = send_letter

    def settle_batch(self, groups: list[RolloutGroup]) -> None:
        """Groups with reward variance were trained, the others skipped."""
        self._failed_steps_in_a_row = 0
        for group in groups:
            self._book(group.index, "trained" if has_variance(group) else "skipped")

    def kill_batch(self, groups: list[RolloutGroup], reason: str) -> None:
        """Groups whose step was not finite: they neither count as an update nor come back.

        Raises:
            RunFailedError: `MAX_FAILED_STEPS_IN_A_ROW` steps in a row were not finite.
        """
        log.error("%s: groups %s are dead", reason, [group.index for group in groups])
        for group in groups:
            self._send_letter(group.index, reason, b"", b"")
            self._book(group.index, "dead", reason)
        self._failed_steps_in_a_row += 1
        if self._failed_steps_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise RunFailedError(
                f"{self._failed_steps_in_a_row} optimizer steps in a row failed; the last one: {reason}"
            )

    def settle_refused(self, refused: list[Refused]) -> None:
        """Records that cannot be trained, and what producers gave up.

        A good group that came in between ends a row of dead ones.

        Raises:
            RunFailedError: more groups have died in a row than the run file allows.
        """
        for record in refused:
            if record.num_received > self._num_received:
                self._num_received = record.num_received
                self._dead_in_a_row = 0
            log.warning("group %s is dead: %s", record.index, record.reason)
            self._send_letter(record.index, record.reason, record.payload, record.entry_id)
            if record.index is None:
                continue
            self._book(record.index, "dead", record.reason)
            self._dead_in_a_row += 1
            if self._dead_in_a_row >= self._max_dead_in_a_row:
                raise RunFailedError(
                    f"trainer.max_dead_in_a_row = {self._max_dead_in_a_row} groups have died in a row; by reason: "
                    f"{dict(self._ledger.dead_reasons)}; the last one: group {record.index}: {record.reason}"
                )

    def _book(self, index: int, outcome: str, reason: str = "") -> None:
        self._ledger.settle(index, outcome, reason)
        self._metrics.groups_settled.labels(outcome).inc()
