"""Settles indexes in the ledger, with a dead letter for each one that died."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping

from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.stream.ledger import Ledger, RunFailedError
from penstock.consumers.stream.reader import ReadyGroup, Refused
from penstock.schemas.rollout import ABANDONED, RolloutGroup, encode_entry

log = logging.getLogger(__name__)

MAX_FAILED_STEPS_IN_A_ROW = 8
MOST_SHOWN = 8
"""Most reasons quoted in the error that ends a run; `penstock audit` shows all."""


class Settlement:
    """Settles groups in the ledger. A dead letter is sent first: a crash in between repeats it, which changes nothing.

    send_letter: appends a record to the dead-letter stream.
    is_flat: returns whether a group has no reward variance, for curricula.
    """

    def __init__(
        self,
        ledger: Ledger,
        max_dead_in_a_row: int,
        send_letter: Callable[[Refused], None],
        is_flat: Callable[[RolloutGroup], bool] = lambda group: False,
    ) -> None:
        self._ledger = ledger
        self._max_dead_in_a_row = max_dead_in_a_row
        self._dead_in_a_row = 0
        self.num_abandoned = 0
        """Groups abandoned by agents since the last good one was read."""
        self._failed_steps_in_a_row = 0
        self._num_received = 0
        self._send_letter = send_letter
        self._is_flat = is_flat

    def settle_batch(self, groups: list[RolloutGroup], report: StepReport) -> None:
        """Settles groups that contribute to the loss as trained, the others as skipped."""
        for group in groups:
            self._settle(group, "trained" if report.teaches(group.index) else "skipped")

    def pass_over(self, group: RolloutGroup) -> None:
        """Settles a group as skipped that no batch takes."""
        self._settle(group, "skipped")

    def mark_dead(self, groups: Mapping[int, ReadyGroup], reasons: Mapping[int, str]) -> None:
        """Settles groups as dead whose loss was not finite. reasons: by index. They are not sampled again."""
        for reason in sorted(set(reasons.values())):
            log.error("%s: groups %s are dead", reason, [index for index in groups if reasons[index] == reason])
        for index, ready in groups.items():
            self._send_letter(Refused(index, reasons[index], encode_entry(ready.group)[0], ready.entry_id))
            self._ledger.settle(index, "dead", reasons[index])

    def count_step(self, failure: str | None) -> None:
        """Counts consecutive failed batches; call it after settling. failure: why no optimizer step was taken, or None.

        Raises:
            RunFailedError: `MAX_FAILED_STEPS_IN_A_ROW` batches in a row have failed.
        """
        self._failed_steps_in_a_row = 0 if failure is None else self._failed_steps_in_a_row + 1
        if self._failed_steps_in_a_row >= MAX_FAILED_STEPS_IN_A_ROW:
            raise RunFailedError(
                f"{self._failed_steps_in_a_row} optimizer steps in a row failed; the last one: {failure}"
            )

    def settle_refused(self, refused: list[Refused]) -> None:
        """Settles records that cannot be trained on, and groups that producers gave up, as dead.

        A good group read in between ends a row of dead ones, and a group abandoned by its agents does not count: the
        run waits for an outage of agents to end. Every record is settled before the run fails.

        Raises:
            RunFailedError: more groups have died in a row than the run file allows.
        """
        failure: RunFailedError | None = None
        for record in refused:
            if record.num_received > self._num_received:
                self._num_received = record.num_received
                self._dead_in_a_row = self.num_abandoned = 0
            log.warning("group %s is dead: %s", record.index, record.reason)
            self._send_letter(record)
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
