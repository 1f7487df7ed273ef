"""The trainer's model and optimizer: one batch in, one optimizer step, weights out."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from consumers.batch import Batch, MicroBatch
from consumers.diagnostics import diagnose
from consumers.fp32_head import selected_logprobs
from consumers.importance import correct
from consumers.interfaces import LossInputs, Objective
from consumers.model import PackedModel, choose_device
from schemas.config import ConfigError, RunConfig
from schemas.plug import construct

NOTHING_TO_TRAIN = "nothing left to train"
"""The `skipped_reason` of a batch without an unmasked token; every other one is a failure."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one batch did.

    metrics: always reward, learning_rate, loss, grad_norm; with unmasked tokens also entropy, the names of
        `diagnostics.diagnose` and the objective's own (`policy_clipped_frac`). Those of a skipped step may be NaN or
        infinite.
    skipped_reason: why no optimizer step was taken; None where it was.
    phase_s: seconds by phase: forward, backward, optimizer, diagnostics. On CUDA kernels run on after the call that
        started them, and the phase that waits is charged.
    """

    metrics: dict[str, float]
    lag_histogram: dict[int, int]
    num_tokens_trained: int
    num_tokens_masked_lag: int
    skipped_reason: str | None = None
    phase_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scored:
    """The detached per-token results of one micro-batch; M sampled tokens."""

    loss: Tensor
    proximal_logprobs: Tensor
    behavior_logprobs: Tensor
    weights: Tensor
    entropy: Tensor
    lag_of_row: Tensor
    loss_mask: Tensor
    keep_mask: Tensor
    metrics: dict[str, Tensor]


class Learner:
    """Owns the float32 masters, the optimizer and the objective. Knows nothing of Redis or files it is not handed.

    The forward pass runs on the weights that are published: rounded to `model.dtype`, gradients straight through to the
    masters, head in float32 on the rounded values. On CPU it sets torch's thread count to `trainer.num_threads`.

    Args:
        num_updates: batches the learning rate's decay is laid out for; None takes `config.num_updates`.

    Raises:
        ConfigError: no such model, a device that is not there, an objective that does not fit, settings that the
            trainer cannot reproduce.
    """

    def __init__(self, config: RunConfig, *, num_updates: int | None = None) -> None:
        self.config = config
        self.num_steps = 0
        """Optimizer steps taken."""
        self.num_batches = 0
        """Batches seen, those with nothing left to train included, failed ones not: the learning rate follows it."""
        self._num_updates = num_updates if num_updates is not None else config.num_updates
        self._check(config)
        self.objective: Objective = construct(config.objective, "objective", Objective)
        trainer = config.trainer
        self.device = choose_device(trainer.device)
        if self.device.type == "cpu":
            torch.set_num_threads(trainer.num_threads)
        self.model = PackedModel(
            config.model.path,
            config.model.dtype,
            self.device,
            gradient_checkpointing=trainer.gradient_checkpointing,
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=trainer.learning_rate,
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch) -> StepReport:
        """Forward, loss and backward over the micro-batches, then one clipped AdamW step.

        Loss and gradient add up over the micro-batches in their order: equal batch and state give equal bits on CPU.
        A loss or gradient norm that is not finite, or a batch with every token masked or rejected, leaves the model as
        it was.

        Every group must have passed `check_trainable` with the model's vocabulary.
        """
        phases = _Phases()
        learning_rate = self._learning_rate()
        scored = []
        self.optimizer.zero_grad()
        for cpu_microbatch in batch.microbatches:
            loss, part = self._score(cpu_microbatch.to(self.device), batch)
            phases.end("forward")
            loss.backward()
            phases.end("backward")
            scored.append(part)
        grad_norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None], foreach=True
        )
        total_loss = torch.stack([part.loss for part in scored]).sum() if scored else torch.zeros(())
        metrics = {
            "reward": batch.reward_mean,
            "learning_rate": learning_rate,
            "loss": total_loss.item(),
            "grad_norm": grad_norm.item(),
        }
        skipped = _reason_to_skip(scored, metrics["loss"], metrics["grad_norm"])
        if skipped is None:
            self._update(learning_rate, grad_norm)
            self.num_steps += 1
        if skipped in (None, NOTHING_TO_TRAIN):
            self.num_batches += 1
        self.optimizer.zero_grad()
        phases.end("optimizer")
        if batch.num_tokens_trained:
            metrics |= _token_metrics(scored, self.config.correction.threshold)
        phases.end("diagnostics")
        return StepReport(
            metrics=metrics,
            lag_histogram=batch.lag_histogram,
            num_tokens_trained=batch.num_tokens_trained,
            num_tokens_masked_lag=batch.num_tokens_masked_lag,
            skipped_reason=skipped,
            phase_s=phases.seconds,
        )

    @torch.no_grad()
    def proximal_logprobs(self, batch: Batch) -> list[Tensor]:
        """The present policy's logprobs of each micro-batch's sampled tokens, [M] float32 each; no step is taken."""
        found = []
        for cpu_microbatch in batch.microbatches:
            microbatch = cpu_microbatch.to(self.device)
            found.append(self._logprobs(microbatch)[0])
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

    @staticmethod
    def _check(config: RunConfig) -> None:
        if config.model.dtype != "float32" and config.engine.head_dtype != "float32":
            raise ConfigError(
                f"engine.head_dtype = {config.engine.head_dtype!r} with model.dtype = {config.model.dtype!r}: the "
                "trainer's head is float32, and on one side only it widens the gap; expected 'float32'"
            )

    def _score(self, microbatch: MicroBatch, batch: Batch) -> tuple[Tensor, _Scored]:
        """The micro-batch's share of the loss, under gradient, and its detached per-token values."""
        current, entropy = self._logprobs(microbatch)
        # One optimizer step a batch: the current policy is still the proximal one, so this is its recomputation.
        proximal = current.detach()
        correction = correct(
            proximal,
            microbatch.behavior_logprobs,
            microbatch.loss_mask,
            microbatch.lag,
            self.config.correction,
            advantages=microbatch.advantages,
            current_logprobs=proximal,
        )
        outputs = self.objective(
            LossInputs(
                current_logprobs=current,
                proximal_logprobs=proximal,
                behavior_logprobs=microbatch.behavior_logprobs,
                importance_weights=correction.weights,
                advantages=microbatch.advantages,
                loss_mask=correction.keep_mask,
                entropy=entropy,
                row_ids=microbatch.row_ids,
                rollout_tokens=microbatch.rollout_tokens,
                denominator=float(batch.num_tokens),
                num_rollouts=batch.num_rollouts,
            )
        )
        scored = _Scored(
            loss=outputs.loss.detach(),
            proximal_logprobs=proximal,
            behavior_logprobs=microbatch.behavior_logprobs,
            weights=correction.weights,
            entropy=entropy.detach(),
            lag_of_row=_oldest_of_row(microbatch.lag, microbatch.row_ids),
            loss_mask=microbatch.loss_mask,
            keep_mask=correction.keep_mask,
            metrics=outputs.metrics,
        )
        return outputs.loss, scored

    def _logprobs(self, microbatch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Logprobs of the sampled tokens and entropies, [M] float32 each."""
        hidden, head = self.model.forward(microbatch)
        return selected_logprobs(
            F.embedding(microbatch.predicting, hidden), head, microbatch.targets, microbatch.temperature
        )

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


def _reason_to_skip(scored: list[_Scored], loss: float, grad_norm: float) -> str | None:
    if not any(part.keep_mask.any() for part in scored):
        return NOTHING_TO_TRAIN
    if not math.isfinite(loss):
        return "loss is not finite"
    if not math.isfinite(grad_norm):
        return "gradient norm is not finite"
    return None


def _oldest_of_row(lag: Tensor, row_ids: Tensor) -> Tensor:
    """[M] the largest lag in each token's row."""
    rows = int(row_ids[-1]) + 1 if len(row_ids) else 0
    return lag.new_zeros(rows).scatter_reduce(0, row_ids, lag, "amax")[row_ids]


def _token_metrics(scored: list[_Scored], threshold: float) -> dict[str, float]:
    def joined(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in scored])

    mask = joined("loss_mask")
    count = mask.sum()
    sums: dict[str, Tensor] = {}
    for part in scored:
        for name, value in part.metrics.items():
            sums[name] = sums.get(name, torch.zeros_like(value)) + value
    metrics = {name: (value / count).item() for name, value in sums.items()}
    metrics["entropy"] = (torch.where(mask, joined("entropy"), 0.0).sum() / count).item()
    proximal, behavior = joined("proximal_logprobs"), joined("behavior_logprobs")
    # In a row that began under older weights even a fresh token saw keys and values of theirs.
    fresh = torch.cat([part.lag_of_row == 0 for part in scored]) & mask
    if fresh.any():
        metrics["mismatch_lag0"] = (proximal - behavior)[fresh].abs().mean().item()
    return metrics | diagnose(proximal, behavior, joined("weights"), mask, threshold)
