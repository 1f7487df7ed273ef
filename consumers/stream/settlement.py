"""Settles indexes in the ledger, with a dead letter for each one that died."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from penstock.consumers.learning.step_report import StepReport
from penstock.consumers.stream.ledger import Ledger, RunFailedError
from penstock.consumers.stream.reader import ReadyGroup, Refused
from penstock.schemas.rollout import ABANDONED, RolloutGroup, encode_group

log = logging.getLogger(__name__)

SendLetter = Callable[[int | None, str, bytes, bytes, str, str], None]

MAX_FAILED_STEPS_IN_A_ROW = 8
MOST_SHOWN = 8
"""Reasons quoted in the error that ends a run; `penstock audit` has them all."""


class Settlement:
    """Settles groups in the ledger. A dead letter goes first: a crash in between repeats it, which changes nothing.

    send_letter: (index or None, reason, payload, id of the rollout entry, producer, traceback), onto the dead-letter
        stream.
    is_flat: whether a group is without reward variance, for curricula.
    """

    def __init__(
        self,
        ledger: Ledger,
        max_dead_in_a_row: int,
        send_letter: SendLetter,
        is_flat: Callable[[RolloutGroup], bool] = lambda group: False,
    ) -> None:
        self._ledger = ledger
        self._max_dead_in_a_row = max_dead_in_a_row
        self._dead_in_a_row = 0
        self.num_abandoned = 0
        """Groups that agents have abandoned since the last good one was read."""
        self._failed_steps_in_a_row = 0
        self._num_received = 0
        self._send_letter = send_letter
        self._is_flat = is_flat

    def settle_batch(self, groups: list[RolloutGroup], report: StepReport) -> None:
        """Settles groups that teach something as trained, the others as skipped."""
        for group in groups:
            self._settle(group, "trained" if report.teaches(group.index) else "skipped")

    def pass_over(self, group: RolloutGroup) -> None:
        """Settles a group that no batch takes as skipped."""
        self._settle(group, "skipped")

    def mark_dead(self, groups: Mapping[int, ReadyGroup], reasons: Mapping[int, str]) -> None:
        """Settles groups whose loss was not finite, with the reason of each, by index; they are not sampled again."""
        for reason in sorted(set(reasons.values())):
            log.error("%s: groups %s are dead", reason, [index for index in groups if reasons[index] == reason])
        for index, ready in groups.items():
            self._send_letter(index, reasons[index], encode_group(ready.group), ready.entry_id, "", "")
            self._ledger.settle(index, "dead", reasons[index])

    def count_step(self, failure: str | None) -> None:
        """Counts failed batches, after the batch is settled. failure: why no optimizer step was taken; None if one was.

        Raises:
            RunFailedError: `MAX_FAILED_STEPS_IN_A_ROW` batches in a row have failed.
        """
        self._failed_steps_in_a_row = 0 if failure is None else self._failed_steps_in_a_row + 1
        if self._failed_steps_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise RunFailedError(
                f"{self._failed_steps_in_a_row} optimizer steps in a row failed; the last one: {failure}"
            )

    def settle_refused(self, refused: list[Refused]) -> None:
        """Settles records that cannot be trained on, and groups that producers gave up.

        A good group that was read in between ends a row of dead ones, and one that its agents have abandoned does not
        count: an outage of agents is waited for. Every record is settled before the run is given up.

        Raises:
            RunFailedError: more groups have died in a row than the run file allows.
        """
        failure: RunFailedError | None = None
        for record in refused:
            if record.num_received > self._num_received:
                self._num_received = record.num_received
                self._dead_in_a_row = self.num_abandoned = 0
            log.warning("group %s is dead: %s", record.index, record.reason)
            self._send_letter(
                record.index, record.reason, record.payload, record.entry_id, record.producer, record.traceback
            )
            if record.index is None:
                continue
            self._ledger.settle(record.index, "dead", record.reason)
            if record.reason.partition(":")[0] == ABANDONED:
                self.num_abandoned += 1
                continue
            self._dead_in_a_row += 1
            if failure is None and self._dead_in_a_row >= self._max_dead_in_a_row:
                most = dict(Counter(self._ledger.dead_reasons).most_common(MOST_SHOWN))
                failure = RunFailedError(
                    f"trainer.max_dead_in_a_row = {self._max_dead_in_a_row} groups have died in a row; by reason: "
                    f"{most}; the last one: group {record.index}: {record.reason}"
                )
        if failure is not None:
            raise failure

    def _settle(self, group: RolloutGroup, outcome: str) -> None:
        rewards = [rollout.reward.value for rollout in group.rollouts]
        self._ledger.settle(group.index, outcome, rewards=rewards, flat=self._is_flat(group))
