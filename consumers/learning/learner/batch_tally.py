"""Sums over a batch's optimizer steps, from which its report is made."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.batch.batch import Batch, MicroBatch, MiniBatch
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN, RowGap, StepReport, TokenFindings
from penstock.consumers.learning.loss.diagnostics import Level, MismatchSums, lag_buckets
from penstock.consumers.learning.loss.rows import row_numbers
from penstock.consumers.learning.loss.scoring import Scored
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError, CorrectionConfig, RunConfig
from penstock.schemas.metrics import part_key

log = logging.getLogger(__name__)
_OWN_METRICS = frozenset(
    ("reward", "reward_std", "completion_tokens", "truncated_frac", "learning_rate", "loss", "grad_norm", "loss_scale")
)


class _Step(NamedTuple):
    """An optimizer step of the mini-batch at a place in the batch; reason: why it was not taken, None if it was."""

    place: int
    loss: float
    grad_norm: float
    reason: str | None


class BatchTally:
    """Adds up the optimizer steps of one batch, and makes its report. device: the micro-batches' device."""

    def __init__(self, config: RunConfig, ranks: Ranks, batch: Batch, device: torch.device) -> None:
        self._ranks = ranks
        self._environments = batch.environments.to(device)
        self._num_environments = len(batch.lag_histograms)
        indexes, groups = np.unique(batch.rewards.indexes, return_inverse=True)
        self._indexes: list[int] = indexes.tolist()
        self._groups = torch.from_numpy(groups.astype(np.int64)).to(device)
        self._gaps = torch.zeros(len(indexes), len(RowGap._fields), dtype=torch.float64, device=device)
        self._failed_groups: dict[int, str] = {}
        self._spared: set[int] = set()
        self._config = config
        self._steps: list[_Step] = []
        self._mismatch: MismatchSums | None = None
        self._findings: dict[int, list[TokenFindings | None]] = {}
        self._sums: dict[str, Tensor] = {}
        """Over the unmasked tokens of the steps that did not fail; trained and rejected tokens of the first epoch."""
        self._phase_s: dict[str, float] = {}
        self._phase_began_s = time.perf_counter()

    def end_phase(self, name: str) -> None:
        """Adds the time since the last call to this phase."""
        now = time.perf_counter()
        self._phase_s[name] = self._phase_s.get(name, 0.0) + now - self._phase_began_s
        self._phase_began_s = now

    def diagnose(self, place: int, microbatch: MicroBatch, scored: Scored, scale: float | None) -> None:
        """Adds a micro-batch of the first epoch to the diagnostics. Waits for no device. scale: as in `metric_sums`."""
        correction, rollouts = scored.correction, microbatch.rollouts[microbatch.row_ids]
        tokens = scored.proximal_logprobs, microbatch.behavior_logprobs, microbatch.loss_mask, microbatch.row_ids
        lag = microbatch.lag
        if scored.recomputed is not None:
            lag = torch.where(scored.recomputed & microbatch.is_pure, 0, lag)  # no drift is left in their gap
        self._gaps += gap_sums(*tokens, lag, self._groups[rollouts], len(self._indexes))
        found = MismatchSums.of_packed(
            *tokens,
            microbatch.lag,
            correction,
            current_logprobs=scored.current_logprobs,
            threshold=self._config.correction.threshold,
            advantages=scored.advantages,
            level=_judged_level(self._config.correction),
            environments=self._environments[rollouts],
            num_environments=self._num_environments,
        )
        if scale is not None:
            found = found.scaled(scale)
        self._mismatch = found if self._mismatch is None else self._mismatch.merge(found)
        if self._config.record and scale is None:
            weights = correction.weights.float()
            findings = TokenFindings(scored.proximal_logprobs.float(), weights, correction.keep_mask)
            self._findings.setdefault(place, []).append(findings)

    def pass_over(self, place: int) -> None:
        """Keeps the place of a micro-batch in which this rank is idle among its findings."""
        if self._config.record:
            self._findings.setdefault(place, []).append(None)

    def end_step(
        self, place: int, minibatch: MiniBatch, scored: list[Scored], sums: list[dict[str, Tensor]], grad_norm: Tensor
    ) -> bool:
        """Adds a mini-batch after its backward passes; returns whether to take the optimizer step.

        The answer is the same on every rank: the loss is summed over them. grad_norm: over all ranks. Waits for the
        device once.
        """
        found = [grad_norm]
        if scored:
            found.append(torch.stack([part.loss for part in scored]).sum())
            found.append(torch.stack([part.correction.keep_mask.any() for part in scored]).sum())
        norm, *own = torch.stack([value.double() for value in found]).tolist()
        loss, num_kept = self._ranks.add(torch.tensor(own or [0.0, 0.0], dtype=torch.float64)).tolist()
        reason = _reason_to_skip(num_kept > 0, loss, norm)
        self._steps.append(_Step(place, loss, norm, reason))
        if place not in self.failed:
            for values in sums:
                for name, value in values.items():
                    self._sums[name] = self._sums[name] + value if name in self._sums else value
        elif self._ranks.is_lead:
            log.error("%s: no optimizer step for groups %s", reason, list(minibatch.indexes))
        return reason is None

    @property
    def failed(self) -> dict[int, str]:
        """By a mini-batch's place in the batch: why its loss or gradient was not finite."""
        return {step.place: step.reason for step in self._steps if step.reason and step.reason != NOTHING_TO_TRAIN}

    @property
    def _taken(self) -> list["_Step"]:
        return [step for step in self._steps if step.reason is None]

    def blame(self, place: int, is_finite: Callable[[MiniBatch], bool], minibatch: MiniBatch) -> None:
        """Divides the groups of a failed mini-batch that has taken no step into failed and spared ones.

        is_finite: returns whether a mini-batch's loss and gradient are finite.
        """
        if any(step.place == place for step in self._taken):
            return
        finite: dict[int, bool] = {}
        waiting = minibatch.alone()
        while (alone := self.next_part(waiting)) is not None:
            finite[alone.indexes[0]] = is_finite(alone)
        spared = {index for index, is_spared in finite.items() if is_spared}
        if len(spared) == len(finite):
            spared = set()  # each is finite alone: the cause cannot be found
        self._spared |= spared
        self._failed_groups |= dict.fromkeys(finite.keys() - spared, self.failed[place])

    def next_part(self, waiting: Iterator[MiniBatch]) -> MiniBatch | None:
        """Returns this rank's part of the next mini-batch, which the lead alone has; None after the last."""
        whole, size = next(waiting, None), self._ranks.size
        return self._ranks.hand_out(lambda rank: None if whole is None else whole.of_rank(rank, size))

    def report(self, batch: Batch, learning_rate: float) -> StepReport:
        """Makes the report after the last step. Fetches the sums, and waits for the device.

        learning_rate: the rate of the batch's first step.
        """
        metrics = {**batch.outcome, "learning_rate": learning_rate, **self._means()}
        fetched = torch.stack([value.double() for value in self._sums.values()]).tolist() if self._sums else []
        own = _RankFindings(dict(zip(self._sums, fetched, strict=True)), self._mismatch, self._findings, self._gaps)
        found = _merged(self._ranks.gather(own.cpu()))
        sums = found.sums
        num_tokens = sums.pop("num_tokens", 0)
        num_trained, num_rejected = (int(sums.pop(f"num_tokens_{name}", 0)) for name in ("trained", "rejected"))
        if num_tokens:
            metrics |= {name: value / num_tokens for name, value in sums.items()}
        masked = batch.masked_by_lag
        if found.mismatch is not None:
            metrics |= found.mismatch.metrics(masked)
            by_environment = found.mismatch.by_environment(masked)
            num_judged, abs_sum = found.gaps.sum(0).tolist()
            if num_judged and self._config.correction.proximal == "sampled_version":
                metrics["mismatch_lag0"] = abs_sum / num_judged  # rows of any lag: no drift is in them
        else:  # every token is masked
            by_environment = [{"masked_frac": 1.0} if num_masked else {} for num_masked in masked.sum(1).tolist()]
            metrics |= {"masked_frac": 1.0} if masked.any() else {}
        self.end_phase("diagnostics")
        return StepReport(
            metrics=metrics,
            lag_histogram=batch.lag_histogram,
            num_tokens_trained=num_trained,
            num_tokens_masked_lag=batch.num_tokens_masked_lag,
            advantages=batch.group_advantages,
            has_teacher=self._config.teacher is not None,
            num_tokens_rejected=num_rejected,
            num_optimizer_steps=len(self._taken),
            skipped_reason=None if self._taken else next(iter(self.failed.values()), NOTHING_TO_TRAIN),
            steps_skipped=dict(Counter(step.reason for step in self._steps if step.reason is not None)),
            failed=self._failed_groups,
            spared=frozenset(self._spared),
            phase_s=self._phase_s,
            findings={place: [part for part in parts if part] for place, parts in found.findings.items()},
            environments={
                name: {"lag_mean": _mean_lag(histogram), "num_tokens_sampled": histogram.total(), **measured}
                for (name, histogram), measured in zip(batch.lag_histograms.items(), by_environment, strict=True)
            },
            gaps={
                index: RowGap(int(num_tokens), abs_sum)
                for index, (num_tokens, abs_sum) in zip(self._indexes, found.gaps.tolist(), strict=True)
                if num_tokens
            },
        )

    def _means(self) -> dict[str, float]:
        """Returns mean loss and gradient norm over the steps taken; over all steps if none was."""
        steps = self._taken or self._steps
        return {name: sum(getattr(step, name) for step in steps) / max(1, len(steps)) for name in ("loss", "grad_norm")}


@dataclass(frozen=True)
class _RankFindings:
    """One rank's contribution to a report; see `BatchTally`."""

    sums: dict[str, float]
    mismatch: MismatchSums | None
    findings: dict[int, list[TokenFindings | None]]
    gaps: Tensor

    def cpu(self) -> "_RankFindings":
        findings = {place: [part and part.cpu() for part in parts] for place, parts in self.findings.items()}
        mismatch = None if self.mismatch is None else self.mismatch.cpu()
        return _RankFindings(self.sums, mismatch, findings, self.gaps.cpu())


def _merged(by_rank: Sequence[_RankFindings]) -> _RankFindings:
    """Merges the findings of all ranks; those of a mini-batch in the order of its micro-batches, each rank's first one
    first."""
    sums: dict[str, float] = {}
    mismatch: MismatchSums | None = None
    for each in by_rank:
        sums = {name: sums.get(name, 0.0) + each.sums.get(name, 0.0) for name in sums | each.sums}
        if each.mismatch is not None:
            mismatch = each.mismatch if mismatch is None else mismatch.merge(each.mismatch)
    places = sorted({place for each in by_rank for place in each.findings})
    findings = {
        place: [part for turn in zip_longest(*(each.findings.get(place, ()) for each in by_rank)) for part in turn]
        for place in places
    }
    return _RankFindings(sums, mismatch, findings, torch.stack([each.gaps for each in by_rank]).sum(0))


@torch.no_grad()
def gap_sums(
    trainer: Tensor,
    engine: Tensor,
    loss_mask: Tensor,
    row_ids: Tensor,
    lag: Tensor,
    group: Tensor,
    num_groups: int,
) -> Tensor:
    """Returns [num_groups, 2] float64, the `RowGap` of each group's rows in which every token has lag 0, as one has
    that is recomputed under the policy that sampled its whole row: no drift is in it.

    All but the last are [M]: logprobs, the loss mask, ascending rows, lags, and the place of each token's group, below
    `num_groups`. Waits for no device.
    """
    fresh = loss_mask & (lag_buckets(lag, row_numbers(row_ids)) == 0)
    difference = torch.where(fresh, trainer.double() - engine.double(), 0.0)
    sums = torch.zeros(num_groups, len(RowGap._fields), dtype=torch.float64, device=trainer.device)
    return sums.index_add_(0, group, torch.stack([fresh.double(), difference.abs()], dim=1))


def metric_sums(
    microbatch: MicroBatch, scored: Scored, config: RunConfig, *, first_epoch: bool, scale: float | None
) -> dict[str, Tensor]:
    """Returns sums over a micro-batch's unmasked tokens: the trainer's own, and the objective's metrics.

    scale: None for a micro-batch that is trained on; for one of `MiniBatch.skipped` the tokens each token stands for.

    Raises:
        ConfigError: a metric of the objective has a name of the trainer's own.
    """
    mask = microbatch.loss_mask
    own = {"num_tokens": mask.sum(), "entropy": torch.where(mask, scored.entropy, 0.0).sum()}
    if scored.teacher_divergence is not None:
        own["teacher_kl"] = torch.where(mask, scored.teacher_divergence, 0.0).sum()
    if first_epoch and scale is None:
        own["num_tokens_trained"] = mask.sum()
        own["num_tokens_rejected"] = (mask & ~scored.correction.keep_mask).sum()
    parts = {name for name in scored.metrics if name.startswith(part_key(""))}
    if taken := parts | (own.keys() | _OWN_METRICS) & scored.metrics.keys():
        raise ConfigError(
            f"objective.path = {config.objective.path!r}: its metric {min(taken)!r} has a name of the trainer's own; "
            "expected another"
        )
    sums = own | scored.metrics
    return sums if scale is None else {name: value * scale for name, value in sums.items()}


def _mean_lag(histogram: Counter[int]) -> float:
    return sum(lag * num_tokens for lag, num_tokens in histogram.items()) / max(1, histogram.total())


def _judged_level(correction: CorrectionConfig) -> Level:
    """Returns which ratio the correction compares with its threshold."""
    return correction.sequence_ratio if correction.is_sequence_level else "token"


def _reason_to_skip(any_kept: bool, loss: float, grad_norm: float) -> str | None:
    if not any_kept:
        return NOTHING_TO_TRAIN
    if not math.isfinite(loss):
        return "loss is not finite"
    if not math.isfinite(grad_norm):
        return "gradient norm is not finite"
    return None
