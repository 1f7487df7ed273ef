"""The trainer's model and optimizer: one batch in, its optimizer steps taken, weights out."""

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from penstock.consumers.learning.batch import Batch, MicroBatch, MiniBatch
from penstock.consumers.learning.diagnostics import MismatchSums
from penstock.consumers.learning.fp32_head import enable_onednn_matmul
from penstock.consumers.learning.interfaces import Objective
from penstock.consumers.learning.mismatch_terms import Level
from penstock.consumers.learning.model import PackedModel, choose_device
from penstock.consumers.learning.scoring import Scored, StepConstants, TokenScorer
from penstock.schemas.config import ConfigError, CorrectionConfig, RunConfig
from penstock.schemas.process.plugins import construct
from torch import Tensor

log = logging.getLogger(__name__)

_OWN_METRICS = frozenset(("reward", "learning_rate", "loss", "grad_norm"))

NOTHING_TO_TRAIN = "nothing left to train"
"""The `skipped_reason` of a batch without an unmasked token; every other one is a failure."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one batch did.

    metrics: always reward, learning_rate, loss, grad_norm (means over the optimizer steps taken); with unmasked tokens
        also entropy, the objective's own (`policy_clipped_frac`, per token of every step), and the names of
        `MismatchSums.metrics`, of the first epoch. Those of a skipped step may be NaN or infinite.
    num_tokens_trained: unmasked ones, without those of `failed` groups.
    num_tokens_rejected: of them, those given no weight by the correction in the first epoch.
    num_optimizer_steps: steps taken.
    skipped_reason: why no optimizer step was taken; None where one was.
    steps_skipped: how many were not taken, by reason.
    failed: the index of each group that no step was taken for, since loss or gradient were not finite, and why.
    phase_s: seconds by phase: forward, backward, optimizer, diagnostics. On CUDA kernels run on after the call that
        started them, and the phase that waits is charged.
    findings: of a run with `record`, by mini-batch and micro-batch, on CPU.
    """

    metrics: dict[str, float]
    lag_histogram: dict[int, int]
    num_tokens_trained: int
    num_tokens_masked_lag: int
    num_tokens_rejected: int = 0
    num_optimizer_steps: int = 0
    skipped_reason: str | None = None
    steps_skipped: dict[str, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    phase_s: dict[str, float] = field(default_factory=dict)
    findings: dict[int, list["TokenFindings"]] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenFindings:
    """What the first epoch found of a micro-batch's M sampled tokens.

    proximal_logprobs, importance_weights: [M] float32. kept: [M] bool, True where the token may reach the loss.
    """

    proximal_logprobs: Tensor
    importance_weights: Tensor
    kept: Tensor

    def cpu(self) -> "TokenFindings":
        return TokenFindings(self.proximal_logprobs.cpu(), self.importance_weights.cpu(), self.kept.cpu())


@dataclass
class _Steps:
    """Adds up what the optimizer steps of one batch found."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    taken: list[bool] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    failed: dict[int, str] = field(default_factory=dict)
    """Mini-batch by its place in the batch, and why its loss or gradient was not finite."""
    trained: set[int] = field(default_factory=set)
    """Mini-batches that a step was taken for."""
    mismatch: MismatchSums | None = None
    findings: dict[int, list[TokenFindings]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Over the unmasked tokens of every step but the failed ones; what is trained and rejected, of the first epoch."""

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def means(self) -> dict[str, float]:
        """Loss and gradient norm over the steps taken; over all where none was."""
        which = [n for n, taken in enumerate(self.taken) if taken] or range(len(self.taken))
        columns = {"loss": self.losses, "grad_norm": self.grad_norms}
        return {name: sum(values[n] for n in which) / max(1, len(which)) for name, values in columns.items()}


class Learner:
    """Owns the float32 masters, the optimizer and the objective. Knows nothing of Redis or files it is not handed.

    The forward pass runs on the weights that are published: rounded to `model.dtype`, gradients straight through to the
    masters, head in float32 on the rounded values. On CPU it sets torch's thread count to `trainer.num_threads`, and
    with `trainer.cpu_matmul` how the process multiplies matrices.

    Args:
        num_updates: batches the learning rate's decay is laid out for; None takes `config.num_updates`.

    Raises:
        ConfigError: no such model, a device that is not there, an objective that does not fit, settings that the
            trainer cannot reproduce or that would count one gap twice.
    """

    def __init__(self, config: RunConfig, *, num_updates: int | None = None) -> None:
        self.config = config
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_batches = 0
        """Batches seen, those with nothing left to train included, failed ones not: the learning rate follows it."""
        self._num_updates = num_updates if num_updates is not None else config.num_updates
        trainer = config.trainer
        self.device = choose_device(trainer.device)
        if self.device.type == "cpu":
            torch.set_num_threads(trainer.num_threads)
            if trainer.cpu_matmul == "onednn":
                enable_onednn_matmul()
        self.model = PackedModel(
            config.model.path,
            config.model.dtype,
            self.device,
            gradient_checkpointing=trainer.gradient_checkpointing,
        )
        self.scorer = TokenScorer(config, self.model, construct(config.objective, "objective", Objective), self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=trainer.learning_rate,
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch) -> StepReport:
        """Trains a batch: for each epoch and mini-batch forward, loss, backward and one clipped AdamW step.

        The proximal policy is the one before the first of these steps. Loss and gradient add up over the micro-batches
        in their order: equal batch and state give equal bits on CPU. A mini-batch whose loss or gradient norm is not
        finite, or in which every token is masked or rejected, leaves the model as it was.

        Every group must have passed `check_trainable` with the model's vocabulary.
        """
        phases, steps = _Phases(), _Steps()
        learning_rate = self._learning_rate()
        reads = self.scorer.read(batch)
        phases.end("forward")
        for epoch in range(self.config.trainer.num_epochs):
            for place, minibatch in enumerate(batch.minibatches):
                if place not in steps.failed:
                    self._train(place, minibatch, reads[place], learning_rate, steps, phases, first=epoch == 0)
        failed = {
            index: reason
            for place, reason in steps.failed.items()
            if place not in steps.trained
            for index in batch.minibatches[place].indexes
        }
        skipped = None if steps.trained else next(iter(failed.values()), NOTHING_TO_TRAIN)
        if skipped in (None, NOTHING_TO_TRAIN):
            self.num_batches += 1
        metrics = {"reward": batch.reward_mean, "learning_rate": learning_rate, **steps.means()}
        sums = {name: value.item() for name, value in steps.sums.items()}
        num_tokens = sums.pop("num_tokens", 0)
        num_trained, num_rejected = (int(sums.pop(f"num_tokens_{name}", 0)) for name in ("trained", "rejected"))
        if num_tokens:
            metrics |= {name: value / num_tokens for name, value in sums.items()}
        if steps.mismatch is not None:
            metrics |= steps.mismatch.metrics()
        phases.end("diagnostics")
        return StepReport(
            metrics=metrics,
            lag_histogram=batch.lag_histogram,
            num_tokens_trained=num_trained,
            num_tokens_masked_lag=batch.num_tokens_masked_lag,
            num_tokens_rejected=num_rejected,
            num_optimizer_steps=sum(steps.taken),
            skipped_reason=skipped,
            steps_skipped=dict(steps.skipped),
            failed=failed,
            phase_s=phases.seconds,
            findings={place: [part.cpu() for part in parts] for place, parts in steps.findings.items()},
        )

    @torch.no_grad()
    def proximal_logprobs(self, batch: Batch) -> list[Tensor]:
        """The present policy's logprobs of each micro-batch's sampled tokens, [M] float32 each; no step is taken."""
        found = []
        for cpu_microbatch in batch.microbatches:
            found.append(self.scorer.logprobs(cpu_microbatch.to(self.device))[0])
        return found

    def published_weights(self) -> dict[str, Tensor]:
        """Copies on CPU in `model.dtype`, by the names that `save_pretrained` would write; no two share memory."""
        return self.model.published_weights()

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, counters and RNG, without the model; `torch.load(..., weights_only=True)` reads it back.

        The tensors are those in use: write them before the next step.
        """
        state: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "num_batches": self.num_batches,
            "rng": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["rng_cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        self.num_batches = state["num_batches"]
        torch.set_rng_state(state["rng"].cpu())
        if self.device.type == "cuda" and "rng_cuda" in state:
            torch.cuda.set_rng_state(state["rng_cuda"].cpu(), self.device)

    def save_model(self, folder: Path | str) -> None:
        """Writes the float32 masters in transformers' format."""
        self.model.save(folder)

    def load_model(self, folder: Path | str) -> None:
        """Replaces the masters by those of `save_model`; the optimizer keeps its state. Raises ConfigError."""
        self.model.load(folder)

    @property
    def vocabulary(self) -> int:
        """Token ids that can be trained are below this."""
        return self.model.vocabulary

    def _train(
        self,
        place: int,
        minibatch: MiniBatch,
        reads: list[StepConstants],
        learning_rate: float,
        steps: _Steps,
        phases: "_Phases",
        *,
        first: bool,
    ) -> None:
        """One optimizer step, unless there is a reason against it."""
        scored, sums = [], []
        self.optimizer.zero_grad()
        for cpu_microbatch, read in zip(minibatch.microbatches, reads, strict=True):
            microbatch = cpu_microbatch.to(self.device)
            loss, part = self.scorer.score(microbatch, minibatch, read)
            phases.end("forward")
            loss.backward()
            phases.end("backward")
            scored.append(part)
            if first:
                self._diagnose(microbatch, part, steps)
                if self.config.record:
                    steps.findings.setdefault(place, []).append(_findings_of(part))
                phases.end("diagnostics")
            sums.append(self._sums(microbatch, part, first=first))
        grad_norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None], foreach=True
        )
        total_loss = torch.stack([part.loss for part in scored]).sum() if scored else torch.zeros(())
        steps.losses.append(total_loss.item())
        steps.grad_norms.append(grad_norm.item())
        skipped = _reason_to_skip(scored, steps.losses[-1], steps.grad_norms[-1])
        steps.taken.append(skipped is None)
        if skipped is None:
            self._update(learning_rate, grad_norm)
            self.num_steps += 1
            steps.trained.add(place)
        else:
            steps.skipped[skipped] += 1
            if skipped != NOTHING_TO_TRAIN:
                steps.failed[place] = skipped
                log.error("%s: no optimizer step for groups %s", skipped, list(minibatch.indexes))
        if place not in steps.failed:
            for part_sums in sums:
                steps.add(part_sums)
        self.optimizer.zero_grad()
        phases.end("optimizer")

    def _diagnose(self, microbatch: MicroBatch, scored: Scored, steps: _Steps) -> None:
        found = MismatchSums.of_packed(
            scored.proximal_logprobs,
            microbatch.behavior_logprobs,
            microbatch.loss_mask,
            microbatch.row_ids,
            weights=scored.correction.weights,
            keep_mask=scored.correction.keep_mask,
            corrected_mask=scored.correction.corrected_mask,
            current_logprobs=scored.current_logprobs,
            lag=microbatch.lag,
            threshold=self.config.correction.threshold,
            advantages=microbatch.advantages,
            level=_level(self.config.correction),
        )
        steps.mismatch = found if steps.mismatch is None else steps.mismatch.merge(found)

    def _sums(self, microbatch: MicroBatch, scored: Scored, *, first: bool) -> dict[str, Tensor]:
        mask = microbatch.loss_mask
        own = {"num_tokens": mask.sum(), "entropy": torch.where(mask, scored.entropy, 0.0).sum()}
        if first:
            own["num_tokens_trained"] = mask.sum()
            own["num_tokens_rejected"] = (mask & ~scored.correction.keep_mask).sum()
        if taken := (own.keys() | _OWN_METRICS) & scored.metrics.keys():
            raise ConfigError(
                f"objective.path = {self.config.objective.path!r}: its metric {min(taken)!r} has a name of the "
                "trainer's own; expected another"
            )
        return own | scored.metrics

    def _learning_rate(self) -> float:
        trainer = self.config.trainer
        rate = trainer.learning_rate
        if self.num_batches < trainer.warmup_steps:
            rate *= (self.num_batches + 1) / trainer.warmup_steps
        if trainer.decay == "linear":
            rate *= max(0.0, 1 - self.num_batches / self._num_updates)
        return rate

    def _update(self, learning_rate: float, grad_norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(
            self.model.parameters(), self.config.trainer.max_grad_norm, grad_norm, foreach=True
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()


class _Phases:
    """Adds up the time since the last mark under the name of the phase that ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._mark
        self._mark = now


def _findings_of(scored: Scored) -> TokenFindings:
    """Where they are: to fetch them now would be to wait for the device."""
    correction = scored.correction
    return TokenFindings(scored.proximal_logprobs.float(), correction.weights.float(), correction.keep_mask)


def _level(correction: CorrectionConfig) -> Level:
    """What the correction holds against its threshold."""
    return correction.sequence_ratio if correction.mode.startswith("sequence") else "token"


def _reason_to_skip(scored: list[Scored], loss: float, grad_norm: float) -> str | None:
    if not any(part.correction.keep_mask.any() for part in scored):
        return NOTHING_TO_TRAIN
    if not math.isfinite(loss):
        return "loss is not finite"
    if not math.isfinite(grad_norm):
        return "gradient norm is not finite"
    return None
