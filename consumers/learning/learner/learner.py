"""The trainer's model and optimizer: one batch in, its optimizer steps taken, weights out."""

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.consumers.learning.advantages import check_advantage, check_siblings, make_advantage
from penstock.consumers.learning.batch.batch import Batch, MicroBatch, MiniBatch
from penstock.consumers.learning.batch.images import Sees
from penstock.consumers.learning.batch.lag import Lags
from penstock.consumers.learning.batch.packing import pack, pack_demonstrations
from penstock.consumers.learning.batch.sharing import Sharing
from penstock.consumers.learning.interfaces import Objective
from penstock.consumers.learning.learner.batch_tally import BatchTally, metric_sums
from penstock.consumers.learning.learner.loss_scale import LossScale
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.loss.ess import rate_factor, weight_sums
from penstock.consumers.learning.loss.sampled_version import Policies
from penstock.consumers.learning.loss.scoring import StepConstants, TokenScorer
from penstock.consumers.learning.model.device import choose_device, enable_onednn_matmul
from penstock.consumers.learning.model.expert_ranks import check_experts
from penstock.consumers.learning.model.export import export_adapter, export_model
from penstock.consumers.learning.model.learner_state import LearnerState
from penstock.consumers.learning.model.loading import DTYPES
from penstock.consumers.learning.model.optimizer import make_optimizer
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.learning.model.rounding import NUM_STEPS, Movement
from penstock.consumers.learning.model.schedule import learning_rate
from penstock.consumers.learning.ranks import BETWEEN_STEPS, Ranks
from penstock.schemas.adapter import ADAPTER, check_identity, identity_of, saved_identity
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process.plugins import construct, resolve
from penstock.schemas.rollout import RolloutGroup, Segment

log = logging.getLogger(__name__)


class Learner:
    """Owns the float32 masters, the optimizer and the objective. Knows no Redis, and only the files it is given.

    With several ranks each holds its shard of them. The lead's methods start the same methods on the others, which wait
    in `Ranks.follow`; every decision that depends on data uses sums over the ranks.

    The forward pass runs on the published weights: rounded to `model.dtype`, with gradients straight through to the
    masters and the head in float32 on the rounded values. On CPU it sets torch's thread count to `trainer.num_threads`
    and the library of the process's matmuls to `trainer.cpu_matmul`.

    Raises:
        ConfigError: no such model, a missing device, an objective that does not fit, settings that the trainer cannot
            reproduce or that would count one gap twice.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = Ranks() if ranks is None else ranks
        self.num_steps = 0
        """Optimizer steps taken, which determine the learning rate."""
        self.num_warm_steps = 0
        """Steps of the warm start taken, which are not among them."""
        self.loss_scale = LossScale(config.model.dtype == "float16")
        self.before_update: Callable[[], object] = lambda: None
        """Called on every rank before the masters change, during which nobody may read them."""
        self._warned = self._said_padding = False
        trainer = config.trainer
        self.device = choose_device(trainer.device, self.ranks.local_rank)
        if self.device.type == "cpu":
            torch.set_num_threads(trainer.num_threads)
            if trainer.cpu_matmul == "onednn":
                enable_onednn_matmul()
        self.model = PackedModel(
            config.model.path, config.model.dtype, self.device, self.ranks,
            gradient_checkpointing=trainer.gradient_checkpointing, compiled=trainer.compile, lora=config.lora,
            seed=config.seed, dithered=config.dithers, max_model_len=config.engine.max_model_len,
            replays_routes=config.model.replay_routes, by_expert=trainer.expert_parallel,
            per_pass=trainer.context_parallel, freezes_vision="vision" in config.model.freeze,
        )  # fmt: skip
        if trainer.expert_parallel:
            check_experts(self.model.module, self.ranks.size, f"model.path = {config.model.path!r}")
        self._movement: Movement | None = None
        """Of a policy that is rounded."""
        if config.model.dtype != "float32" and config.lora is None:
            self._movement = Movement(self.model.parameters(), DTYPES[config.model.dtype], self.ranks)
            self._warn_of_a_standstill(self._movement.slowest_rate())
        self._adapter = identity_of(config)
        objective = construct(config.objective, "objective", Objective)
        check_advantage(config.advantage)
        check_siblings(config)
        self.scorer = TokenScorer(config, self.model, objective, self.device, self.ranks)
        self._measures_norms = getattr(resolve(config.advantage, "advantage"), "needs_squared_norms", False)
        self._full_rate_ess: float | None = getattr(objective, "full_rate_ess", None)
        if self.scorer.sampled is not None:
            self.scorer.sampled.before_change = lambda: self.before_update()
        self._check_split(trainer.context_parallel)
        self.optimizer = make_optimizer(trainer, self.model.parameters())
        self._saved = LearnerState(self.model, self.optimizer, self.ranks)

    def _check_split(self, per_pass: int) -> None:
        setting = f"trainer.context_parallel = {per_pass}"
        if self.ranks.size % per_pass:
            raise ConfigError(f"{setting}: expected a divisor of the {self.ranks.size} ranks")
        if per_pass > 1:
            self.ranks.neighbours(per_pass)  # made now, while every rank is here

    def _warn_of_a_standstill(self, slowest_rate: float) -> None:
        rate, model = self.config.trainer.learning_rate, self.config.model
        if rate < slowest_rate and not self.config.dithers and self.ranks.is_lead:
            log.warning(
                "trainer.learning_rate = %g with model.rounding = 'nearest': in %d optimizer steps most weights of %s "
                "stay within their rounding interval in %s, which takes a rate of %.1e to leave; model.rounding = "
                "'dithered' has no such limit",
                rate, NUM_STEPS, model.path, model.dtype, slowest_rate,
            )  # fmt: skip

    def step(self, batch: Batch) -> StepReport:
        """Trains a batch: for each epoch and mini-batch forward, loss, backward and one clipped AdamW step.

        The proximal policy is the one before the first of these steps. Loss and gradient add up over the micro-batches
        in order: equal batch and state give equal bits on CPU. A mini-batch whose loss or gradient norm is not finite,
        or in which every token is masked or rejected, leaves the model unchanged.

        Every group must have passed `check_trainable` with the model's vocabulary. batch: from `pack`.
        """
        if 0 < batch.num_rows < self.ranks.size and not self._warned:
            self._warned = True
            log.warning("a batch of %d rows for %d ranks: some are idle", batch.num_rows, self.ranks.size)
        size = self.ranks.size
        self.ranks.order("step", lambda rank: (batch.of_rank(rank, size),))
        return self._step(batch.of_rank(0, size))

    @property
    def orders(self) -> dict[str, Callable[..., object]]:
        """The methods that the lead starts on the other ranks, by name."""
        return {
            "step": self._step,
            "warm step": self._warm_step,
            "published weights": self.model.published_weights,
            "begin checkpoint": self._begin_checkpoint,
            "load checkpoint": self._load_checkpoint,
        }

    def _step(self, batch: Batch) -> StepReport:
        tally = BatchTally(self.config, self.ranks, batch, self.device)
        rates = [learning_rate(self.config, self.num_steps)]  # what is reported if no step is taken
        if self._measures_norms:
            batch = self._with_norms(batch, tally)
        self.ranks.phase = "forward"
        batch, constants = self.scorer.step_constants(batch)
        tally.end_phase("forward")
        for epoch in range(self.config.trainer.num_epochs):
            for place, minibatch in enumerate(batch.minibatches):
                if place not in tally.failed:
                    rates += self._train(place, minibatch, constants[place], tally, first_epoch=epoch == 0)
        report = tally.report(batch, rates[min(1, len(rates) - 1)])
        if self._movement is not None:
            report.metrics["published_movement"] = self._movement.published_share()
        if self.config.model.dtype == "float16":
            report.metrics["loss_scale"] = self.loss_scale.value
        self.ranks.phase = BETWEEN_STEPS
        return report

    def _with_norms(self, batch: Batch, tally: BatchTally) -> Batch:
        """Measures each rollout's gradient at an advantage of 1, and returns the batch with advantages that know it."""
        squares = torch.zeros(len(batch.rewards.values), dtype=torch.float64)
        for minibatch in batch.minibatches:
            waiting = minibatch.alone(by_rollout=True)
            while (one := tally.next_part(waiting)) is not None:
                one = one.with_advantages(torch.ones(len(squares)))
                constants = self.scorer.constants(one.microbatches)
                accumulate = partial(self._accumulate, one, self._loss_of(one, constants))
                loss, norms = self._total(accumulate()), self._grad_norms()
                if self.loss_scale.value > 1 and not norms.isfinite().all():
                    norms = self._rescaled(loss, accumulate, norms)
                squares[one.indexes[0]] = norms.double().square().sum()
        self.optimizer.zero_grad()
        rewards = replace(batch.rewards, squared_norms=squares.numpy())
        return replace(batch, rewards=rewards).with_advantages(make_advantage(self.config.advantage)(rewards))

    def warm_step(self, minibatch: MiniBatch) -> tuple[float, float]:
        """Takes one clipped step on the cross-entropy of demonstrations; returns it, in nats a token, and the gradient
        norm. If one is not finite, the model is left unchanged. The last step clears the optimizer's moments, which are
        of another loss than those to come. minibatch: from `pack_demonstrations`."""
        size = self.ranks.size
        self.ranks.order("warm step", lambda rank: (minibatch.of_rank(rank, size),))
        return self._warm_step(minibatch.of_rank(0, size))

    def _warm_step(self, minibatch: MiniBatch) -> tuple[float, float]:
        settings = self.config.warm_start
        assert settings is not None
        num_tokens = minibatch.num_tokens
        accumulate = partial(self._accumulate, minibatch, lambda _, each: self.scorer.cross_entropy(each, num_tokens))
        loss = self._total(accumulate())
        norms = self._grad_norms()
        if self.loss_scale.value > 1 and not norms.isfinite().all():
            norms = self._rescaled(loss, accumulate, norms)
        self.ranks.phase = "optimizer"
        grad_norm = norms.norm()
        if math.isfinite(loss + grad_norm.item()):
            self._update(norms, grad_norm, settings.learning_rate)
            self.loss_scale.count_step()
        self.optimizer.zero_grad()
        self.num_warm_steps += 1
        if self.num_warm_steps == settings.steps:
            self.optimizer.state.clear()
        self.ranks.phase = BETWEEN_STEPS
        return loss, grad_norm.item()

    def published_weights(self) -> dict[str, Tensor]:
        """Returns copies on CPU in `model.dtype`, by `save_pretrained`'s names; no two share memory."""
        self.ranks.order("published weights")
        return self.model.published_weights()

    def published_parts(self) -> Callable[[], list[PublishedPart]]:
        """See `PackedModel.published_parts`. Every rank calls it at the same point of the training."""
        self.ranks.phase = "publish"
        parts = self.model.published_parts()
        self.ranks.phase = BETWEEN_STEPS
        return parts

    def begin_checkpoint(self, folder: Path) -> Future[dict[str, str]]:
        """Takes a snapshot of masters and moments, at the same point of the training on all ranks, and writes it into
        `folder` in a thread (`LearnerState.begin`)."""
        self.ranks.order("begin checkpoint", lambda _: (folder,))
        return self._begin_checkpoint(folder)

    def _begin_checkpoint(self, folder: Path) -> Future[dict[str, str]]:
        self.ranks.phase = "checkpoint"
        writing = self._saved.begin(folder)
        self.ranks.phase = BETWEEN_STEPS
        return writing

    def load_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        """Resumes from the tensors in `folder` and the `state` saved with them; the optimizer's settings are those of
        this learner's configuration.

        Raises:
            ConfigError: the tensors belong to another model, or to an adapter of another base or scale.
            OSError: they cannot be read.
        """
        check_identity(saved_identity(state), self._adapter, str(folder.parent))
        self.ranks.order("load checkpoint", lambda _: (folder, state))
        self._load_checkpoint(folder, state)

    def _load_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        self.ranks.phase = "load the checkpoint"
        self._saved.load(folder)
        self.num_steps = state["num_steps"]
        self.num_warm_steps = state.get("num_warm_steps", 0)
        if "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])
        torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))
        if self.device.type == "cuda" and "rng_cuda" in state:
            torch.cuda.set_rng_state(torch.tensor(state["rng_cuda"], dtype=torch.uint8), self.device)

    @property
    def export(self) -> Callable[..., None]:
        """The function that exports a checkpoint's model or adapter; see `penstock.consumers.learning.model.export`."""
        return export_model if self._adapter is None else partial(export_adapter, self._adapter)

    def state(self) -> dict[str, Any]:
        """Returns counters and random generators' states as JSON types."""
        state: dict[str, Any] = {
            "num_steps": self.num_steps,
            "num_warm_steps": self.num_warm_steps,
            "rng": torch.get_rng_state().tolist(),
        }
        if self.config.model.dtype == "float16":
            state["loss_scale"] = self.loss_scale.state()
        if self._adapter is not None:
            state[ADAPTER] = msgspec.to_builtins(self._adapter)
        if self.device.type == "cuda":
            state["rng_cuda"] = torch.cuda.get_rng_state(self.device).tolist()
        return state

    def follow_versions(self, policies: Policies) -> None:
        """Names what keeps the published policies of older versions, on every rank; used with `correction.proximal =
        "sampled_version"` alone."""
        if self.scorer.sampled is not None:
            self.scorer.sampled.policies = policies

    @property
    def trains_every_row(self) -> bool:
        """True if the objective needs groups without advantages too."""
        return getattr(self.scorer.objective, "trains_every_row", False)

    def pack(self, groups: Sequence[RolloutGroup], lag_of: Lags) -> Batch:
        """Packs the groups of one update for `step`; see `packing.pack`."""
        batch = pack(groups, lag_of, self.config, every_row=self.trains_every_row, sharing=self._sharing)
        if self._sharing.arrangement == "rectangles" and not self._said_padding:
            self._said_padding = True
            log.warning("padding is %.0f%% of the first batch's rectangles", 100 * batch.padding)
        return batch

    def pack_demonstrations(self, demonstrations: Sequence[Segment]) -> MiniBatch:
        """Packs demonstrations for `warm_step`."""
        return pack_demonstrations(demonstrations, self.config.trainer.tokens_per_microbatch, self._sharing)

    @property
    def _sharing(self) -> Sharing:
        model, split = self.model, self.config.trainer.context_parallel
        return Sharing(self.ranks.size, model.even_length, self.scorer.arrangement, split)

    @property
    def vocabulary(self) -> int:
        """Token ids must be below this."""
        return self.model.vocabulary

    @property
    def experts(self) -> tuple[int, int, int] | None:
        """Layers, experts and experts per token of the routes that rollouts must have; None if they need none."""
        routing = self.model.routing
        return None if routing is None else (routing.num_layers, routing.num_experts, routing.per_token)

    @property
    def sees(self) -> Sees | None:
        """What images in rows must be for the models of a batch; None if one of them sees none."""
        return self.scorer.sees

    def _train(
        self,
        place: int,
        minibatch: MiniBatch,
        constants: list[StepConstants],
        tally: BatchTally,
        *,
        first_epoch: bool,
    ) -> list[float]:
        """Takes one optimizer step, unless `BatchTally.end_step` finds a reason against it.

        Returns the step's learning rate; nothing if it is not taken.
        """
        scored, sums, rates = [], [], []
        weights = torch.zeros(3, dtype=torch.float64, device=self.device)
        num_trained = len(minibatch.microbatches)
        self.optimizer.zero_grad()
        for number, cpu_microbatch in enumerate((*minibatch.microbatches, *minibatch.skipped)):
            is_trained, microbatch = number < num_trained, cpu_microbatch.to(self.device)
            self.ranks.phase = "forward"
            with torch.set_grad_enabled(is_trained):
                loss, part = self.scorer.score(microbatch, minibatch, constants[number])
            if is_trained:
                tally.end_phase("forward")
                self._backward(loss, is_last=number == num_trained - 1)
                tally.end_phase("backward")
            if part is None:
                if is_trained and first_epoch:
                    tally.pass_over(place)
                continue
            if is_trained:
                scored.append(part)
                if self._full_rate_ess is not None:
                    tokens = microbatch.behavior_logprobs, microbatch.loss_mask, microbatch.row_ids
                    weights += weight_sums(part.current_logprobs, *tokens)
            scale = None if is_trained else minibatch.skipped_scale
            if first_epoch:
                tally.diagnose(place, microbatch, part, scale)
            sums.append(metric_sums(microbatch, part, self.config, first_epoch=first_epoch, scale=scale))
            tally.end_phase("diagnostics")
        self.ranks.phase = "optimizer"
        norms = self._grad_norms()
        if self.loss_scale.value > 1 and not norms.isfinite().all():
            accumulate = partial(self._accumulate, minibatch, self._loss_of(minibatch, constants))
            norms = self._rescaled(self._total(sum(part.loss.item() for part in scored)), accumulate, norms)
        grad_norm = norms.norm()
        if tally.end_step(place, minibatch, scored, sums, grad_norm):
            rates.append(learning_rate(self.config, self.num_steps) * self._rate_factor(weights))
            self._update(norms, grad_norm, rates[0])
            self.num_steps += 1
            self.loss_scale.count_step()
        elif place in tally.failed:
            tally.blame(place, self._is_finite, minibatch)
        self.optimizer.zero_grad()
        tally.end_phase("optimizer")
        return rates

    def _rate_factor(self, weights: Tensor) -> float:
        full = self._full_rate_ess
        return 1.0 if full is None else rate_factor(self.ranks.add(weights.cpu()), full)

    def _is_finite(self, minibatch: MiniBatch) -> bool:
        """Returns whether a mini-batch's loss and gradient are finite, with the present weights as proximal policy."""
        with self.loss_scale.off():
            constants = self.scorer.constants(minibatch.microbatches)
            total = self._accumulate(minibatch, self._loss_of(minibatch, constants))
            norm = self._grad_norms().norm().item()
        return math.isfinite(self._total(total) + norm)

    def _total(self, loss: float) -> float:
        """Returns the sum of a loss over the ranks."""
        return self.ranks.add(torch.tensor(loss, dtype=torch.float64)).item()

    def _rescaled(self, loss: float, accumulate: Callable[[], object], norms: Tensor) -> Tensor:
        """Computes gradients that overflow again, at half the loss scale, until they are finite; returns their norms.

        If they are not finite at a scale of 1 either, or if the loss is not, the scale is not to blame and is kept.
        accumulate: replaces the gradients by the same ones at the present scale."""
        if not math.isfinite(loss):
            return norms
        began, state = self.loss_scale.value, self.loss_scale.state()
        while self.loss_scale.value > 1 and not norms.isfinite().all():
            self.loss_scale.halve()
            accumulate()
            norms = self._grad_norms()
        if not norms.isfinite().all():
            self.loss_scale.load(state)
        elif self.ranks.is_lead:
            log.info("gradients overflow float16 at a loss scale of %g: taken at %g", began, self.loss_scale.value)
        return norms

    def _loss_of(self, minibatch: MiniBatch, constants: list[StepConstants]) -> Callable[[int, MicroBatch], Tensor]:
        """Returns the objective's loss of a mini-batch's micro-batches, by their number."""
        return lambda number, microbatch: self.scorer.score(microbatch, minibatch, constants[number])[0]

    def _accumulate(self, minibatch: MiniBatch, loss_of: Callable[[int, MicroBatch], Tensor]) -> float:
        """Replaces the gradients by those of a mini-batch's loss; returns this rank's part of it."""
        self.optimizer.zero_grad()
        total, last = 0.0, len(minibatch.microbatches) - 1
        for number, microbatch in enumerate(minibatch.microbatches):
            self.ranks.phase = "forward"
            loss = loss_of(number, microbatch.to(self.device))
            self._backward(loss, is_last=number == last)
            total += loss.item()
        return total

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.ranks.phase = "backward"
        self.model.reduce_gradients(is_last or self.config.trainer.gradient_accumulation == "sharded")
        (loss * self.loss_scale.value).backward()

    def _grad_norms(self) -> Tensor:
        """Divides the gradients by the loss scale; returns each parameter's gradient norm over all ranks, 0 without a
        gradient."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.loss_scale.value != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        zero = torch.zeros((), device=self.device)
        norms = torch.stack([zero if p.grad is None else p.grad.norm() for p in self.model.parameters()])
        return norms.full_tensor() if isinstance(norms, DTensor) else norms

    def _update(self, norms: Tensor, grad_norm: Tensor, rate: float) -> None:
        parameters = self.model.parameters()
        for parameter, norm in zip(parameters, norms.tolist(), strict=True):
            if norm == 0 and self._adapter is None:
                # Not reached by the batch, as an expert without tokens: zeros on several ranks, nothing on one.
                parameter.grad = None
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.trainer.max_grad_norm, grad_norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.before_update()
        self.optimizer.step()
