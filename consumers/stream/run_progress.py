"""The progress of a run: the counts that its checkpoints hold in addition to the ledger."""

import time
from collections.abc import Sequence

from penstock.consumers.checkpoints.state import CheckpointState, PassedOver
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.schemas.rollout import RolloutGroup


class RunProgress:
    """Batches and running totals of the whole run, including those of earlier trainers."""

    def __init__(self, epoch: int, state: CheckpointState) -> None:
        self.epoch = epoch
        self.num_batches = state.num_batches
        """Updates made."""
        self.num_taken = max(state.taken.values(), default=0)
        """Batches taken, failed ones included: the position of the next one in the record of rollouts."""
        self.passed = state.passed
        """Groups skipped by the batch being filled, or by the last one until `take_passed`."""
        self.skipped_share = state.skipped_share
        """Share of the groups read that batches skip while they are filled: a moving mean."""
        self.best = state.best
        self.totals: dict[str, int | float] = {
            "num_tokens_trained": 0, "num_tokens_masked_lag": 0, "num_tokens_rejected": 0, "num_steps_skipped": 0,
            "train_s": 0.0, "first_prompt_s": 0.0, "last_update_s": 0.0, **state.counters,
        }  # fmt: skip
        self._taken_before = dict(state.taken)

    @property
    def taken(self) -> dict[int, int]:
        """`num_taken` at the end of each earlier epoch on the way here, and now."""
        return {**self._taken_before, self.epoch: self.num_taken}

    def take_passed(self) -> PassedOver:
        """Returns the groups that the last batch skipped while it was filled, and clears them."""
        passed, self.passed = self.passed, PassedOver()
        return passed

    def add(self, groups: Sequence[RolloutGroup], report: StepReport, step_s: float) -> None:
        """Adds one batch to the totals."""
        totals = self.totals
        totals["num_tokens_trained"] += report.num_tokens_trained
        totals["num_tokens_masked_lag"] += report.num_tokens_masked_lag
        totals["num_tokens_rejected"] += report.num_tokens_rejected
        totals["num_steps_skipped"] += sum(report.steps_skipped.values())
        totals["train_s"] += step_s
        totals["last_update_s"] = now = time.time()
        totals["first_prompt_s"] = totals["first_prompt_s"] or now - step_s - longest_s(groups)


def longest_s(groups: Sequence[RolloutGroup]) -> float:
    """Returns the longest time from a claim to its group, each by one host's clock: hosts' clocks may differ."""
    return max(0.0, *(group.timings.appended_s - group.timings.claimed_s for group in groups))
