"""The report of a batch's optimizer steps. Imports no torch: a plan has reports too."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

NOTHING_TO_TRAIN = "nothing left to train"
"""The `skipped_reason` of a batch without an unmasked token; any other reason is a failure."""


class RowGap(NamedTuple):
    """The sum of |trainer - engine logprob| over some tokens, in nats."""

    num_tokens: int = 0
    abs_sum: float = 0.0

    def plus(self, other: "RowGap") -> "RowGap":
        return RowGap(self.num_tokens + other.num_tokens, self.abs_sum + other.abs_sum)

    @property
    def mean(self) -> float:
        """The mean in nats; 0 without tokens."""
        return self.abs_sum / max(1, self.num_tokens)


@dataclass(frozen=True)
class TokenFindings:
    """The first epoch's findings for a micro-batch's M sampled tokens.

    proximal_logprobs, importance_weights: [M] float32. kept: [M] bool, True where the token may reach the loss.
    """

    proximal_logprobs: "Tensor"
    importance_weights: "Tensor"
    kept: "Tensor"

    def cpu(self) -> "TokenFindings":
        return TokenFindings(self.proximal_logprobs.cpu(), self.importance_weights.cpu(), self.kept.cpu())


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The outcome of one batch.

    metrics: always the batch's `outcome`, learning_rate, loss, grad_norm (means over the optimizer steps taken); with
        unmasked tokens also entropy, the objective's own (`policy_clipped_frac`, per token of every step), and the
        names of `MismatchSums.metrics`, of the first epoch: over the tokens of every group, those that are not trained
        on by a sample. Those of a skipped step may be NaN or infinite.
    num_tokens_trained: unmasked tokens of rows that are trained on, without those of failed mini-batches.
    num_tokens_rejected: of those, the tokens without weight by the correction in the first epoch.
    advantages: of each group's siblings, by its index; without a teacher's part.
    has_teacher: every group teaches, whatever its advantages are.
    num_optimizer_steps: steps taken.
    skipped_reason: why no optimizer step was taken; None if one was.
    steps_skipped: the number of steps not taken, by reason.
    failed: index and reason of each group whose loss or gradient is not finite, if it has no optimizer step. If no
        group of a mini-batch is found to be the cause, all that are trained on in it.
    spared: the other groups that failed mini-batches would have trained on; they can still be trained on.
    phase_s: seconds by phase: forward, backward, optimizer, diagnostics. On CUDA kernels continue after the call that
        started them, and the time counts for the phase that waits.
    findings: in a run with `record`, by mini-batch and micro-batch, on CPU.
    environments: by environment the number and the mean lag of its sampled tokens, `num_tokens_sampled` and `lag_mean`,
        masked ones included, and `MismatchSums.by_environment`.
    gaps: by group index, the gap of the group's rows in which every token has lag 0, and with `correction.proximal =
        "sampled_version"` of all that one version sampled; of groups with such rows.
    """

    metrics: dict[str, float]
    lag_histogram: dict[int, int]
    num_tokens_trained: int
    num_tokens_masked_lag: int
    advantages: Mapping[int, tuple[float, ...]]
    has_teacher: bool = False
    num_tokens_rejected: int = 0
    num_optimizer_steps: int = 0
    skipped_reason: str | None = None
    steps_skipped: dict[str, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    spared: frozenset[int] = frozenset()
    phase_s: dict[str, float] = field(default_factory=dict)
    findings: dict[int, list[TokenFindings]] = field(default_factory=dict)
    environments: dict[str, dict[str, float]] = field(default_factory=dict)
    gaps: dict[int, RowGap] = field(default_factory=dict)

    @property
    def num_groups_skipped(self) -> int:
        """The number of groups that teach nothing."""
        return len(self.advantages) - sum(map(self.teaches, self.advantages))

    def teaches(self, index: int) -> bool:
        """Returns whether the group has an advantage other than 0, as with different rewards, or a teacher."""
        return self.has_teacher or any(self.advantages[index])

    @property
    def counts_as_update(self) -> bool:
        """True for a trained batch and for one without an unmasked token; False if every optimizer step failed."""
        return self.skipped_reason in (None, NOTHING_TO_TRAIN)

    def settles(self, index: int) -> bool:
        """Returns whether this batch settles the group. A spared group comes again in a later batch, as does one that
        did not fail if no step was taken."""
        return index in self.failed or (self.counts_as_update and index not in self.spared)
