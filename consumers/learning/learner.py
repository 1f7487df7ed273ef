"""The trainer's model and optimizer: one batch in, its optimizer steps taken, weights out."""

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.consumers.learning.advantages import check_advantage
from penstock.consumers.learning.batch import Batch, MiniBatch
from penstock.consumers.learning.batch_tally import BatchTally, metric_sums
from penstock.consumers.learning.device import choose_device, enable_onednn_matmul
from penstock.consumers.learning.export import export_adapter, export_model
from penstock.consumers.learning.interfaces import Objective
from penstock.consumers.learning.lag import Lags
from penstock.consumers.learning.learner_state import LearnerState
from penstock.consumers.learning.model import PackedModel
from penstock.consumers.learning.optimizer import learning_rate, make_optimizer
from penstock.consumers.learning.packing import pack
from penstock.consumers.learning.published import PublishedPart
from penstock.consumers.learning.ranks import BETWEEN_STEPS, Ranks
from penstock.consumers.learning.scoring import StepConstants, TokenScorer
from penstock.consumers.learning.sharing import Sharing
from penstock.consumers.learning.step_report import StepReport
from penstock.schemas.adapter import ADAPTER, check_identity, identity_of, saved_identity
from penstock.schemas.config import RunConfig
from penstock.schemas.process.plugins import construct
from penstock.schemas.rollout import RolloutGroup

log = logging.getLogger(__name__)


class Learner:
    """Owns the float32 masters, the optimizer and the objective. Knows no Redis, and no files but those it is given.

    With several ranks each has its shard of them. The lead's methods start the same ones of the others, which wait for
    them in `Ranks.follow`; all that is decided from data is decided from the sums over the ranks.

    The forward pass runs on the weights that are published: rounded to `model.dtype`, gradients straight through to the
    masters, head in float32 on the rounded values. On CPU it sets torch's thread count to `trainer.num_threads`, and
    with `trainer.cpu_matmul` how the process multiplies matrices.

    Raises:
        ConfigError: no such model, a device that is missing, an objective that does not fit, settings that the
            trainer cannot reproduce or that would count one gap twice.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = Ranks() if ranks is None else ranks
        self.num_steps = 0
        """Optimizer steps taken: the learning rate follows it."""
        self.before_update: Callable[[], object] = lambda: None
        """Called before each optimizer step, on every rank: nobody may read the masters during it."""
        self.num_updates = 0
        """Batches that count as updates: the reference is replaced by it."""
        self._said = False
        trainer = config.trainer
        self.device = choose_device(trainer.device, self.ranks.local_rank)
        if self.device.type == "cpu":
            torch.set_num_threads(trainer.num_threads)
            if trainer.cpu_matmul == "onednn":
                enable_onednn_matmul()
        self.model = PackedModel(
            config.model.path,
            config.model.dtype,
            self.device,
            self.ranks,
            gradient_checkpointing=trainer.gradient_checkpointing,
            compiled=trainer.compile,
            lora=config.lora,
            seed=config.seed,
        )
        self._adapter = identity_of(config)
        objective = construct(config.objective, "objective", Objective)
        check_advantage(config.advantage)
        self.scorer = TokenScorer(config, self.model, objective, self.device, self.ranks)
        self.optimizer = make_optimizer(trainer, self.model.parameters())
        reference = self.scorer.reference
        self._replaced = reference if config.model.reference_every and isinstance(reference, PackedModel) else None
        self._saved = LearnerState(self.model, self.optimizer, self.ranks, self._replaced)

    def step(self, batch: Batch) -> StepReport:
        """Trains a batch: for each epoch and mini-batch forward, loss, backward and one clipped AdamW step.

        The proximal policy is the one before the first of these steps. Loss and gradient add up over the micro-batches
        in their order: equal batch and state give equal bits on CPU. A mini-batch whose loss or gradient norm is not
        finite, or in which every token is masked or rejected, leaves the model as it was.

        Every group must have passed `check_trainable` with the model's vocabulary. batch: of `pack`.
        """
        if batch.num_rows < self.ranks.size and not self._said:
            self._said = True
            log.warning("a batch of %d rows for %d ranks: some compute nothing", batch.num_rows, self.ranks.size)
        size = self.ranks.size
        self.ranks.order("step", lambda rank: (batch.of_rank(rank, size),))
        return self._step(batch.of_rank(0, size))

    @property
    def orders(self) -> dict[str, Callable[..., object]]:
        """What the lead starts on the other ranks, by name."""
        return {
            "step": self._step,
            "published weights": self.model.published_weights,
            "begin checkpoint": self._begin_checkpoint,
            "load checkpoint": self._load_checkpoint,
        }

    def _step(self, batch: Batch) -> StepReport:
        tally = BatchTally(self.config, self.ranks, batch, self.device)
        rate = learning_rate(self.config, self.num_steps)
        self.ranks.phase = "forward"
        batch, constants = self.scorer.step_constants(batch)
        tally.end_phase("forward")
        for epoch in range(self.config.trainer.num_epochs):
            for place, minibatch in enumerate(batch.minibatches):
                if place not in tally.failed:
                    self._train(place, minibatch, constants[place], tally, first_epoch=epoch == 0)
        report = tally.report(batch, rate)
        self.num_updates += report.counts_as_update
        every = self.config.model.reference_every
        if self._replaced is not None and every and report.counts_as_update and self.num_updates % every == 0:
            self._replaced.copy(self.model.state())
        self.ranks.phase = BETWEEN_STEPS
        return report

    def published_weights(self) -> dict[str, Tensor]:
        """Copies on CPU in `model.dtype`, by the names that `save_pretrained` would write; no two share memory."""
        self.ranks.order("published weights")
        return self.model.published_weights()

    def published_parts(self) -> Callable[[], list[PublishedPart]]:
        """See `PackedModel.published_parts`. Every rank calls it, at one point of the training."""
        self.ranks.phase = "publish"
        parts = self.model.published_parts()
        self.ranks.phase = BETWEEN_STEPS
        return parts

    def begin_checkpoint(self, folder: Path) -> Future[dict[str, str]]:
        """Takes a snapshot of masters and moments and writes it into `folder` in a thread (`LearnerState.begin`).
        At one point of the training of all ranks."""
        self.ranks.order("begin checkpoint", lambda _: (folder,))
        return self._begin_checkpoint(folder)

    def _begin_checkpoint(self, folder: Path) -> Future[dict[str, str]]:
        self.ranks.phase = "checkpoint"
        writing = self._saved.begin(folder)
        self.ranks.phase = BETWEEN_STEPS
        return writing

    def load_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        """Continues from the tensors in `folder` and the `state` of the same moment; the optimizer's settings are those
        of this learner's own configuration.

        Raises:
            ConfigError: they are another model's, or an adapter of another base or another scale.
            OSError: they cannot be read.
        """
        check_identity(saved_identity(state), self._adapter, str(folder.parent))
        self.ranks.order("load checkpoint", lambda _: (folder, state))
        self._load_checkpoint(folder, state)

    def _load_checkpoint(self, folder: Path, state: dict[str, Any]) -> None:
        self.ranks.phase = "load the checkpoint"
        self._saved.load(folder)
        self.num_steps, self.num_updates = state["num_steps"], state["num_updates"]
        torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))
        if self.device.type == "cuda" and "rng_cuda" in state:
            torch.cuda.set_rng_state(torch.tensor(state["rng_cuda"], dtype=torch.uint8), self.device)

    @property
    def export(self) -> Callable[..., None]:
        """What makes a folder of a checkpoint's model, or adapter; see `penstock.consumers.learning.export`."""
        return export_model if self._adapter is None else partial(export_adapter, self._adapter)

    def state(self) -> dict[str, Any]:
        """Counters and random generators, as JSON takes them."""
        state: dict[str, Any] = {
            "num_steps": self.num_steps,
            "num_updates": self.num_updates,
            "rng": torch.get_rng_state().tolist(),
        }
        if self._adapter is not None:
            state[ADAPTER] = msgspec.to_builtins(self._adapter)
        if self.device.type == "cuda":
            state["rng_cuda"] = torch.cuda.get_rng_state(self.device).tolist()
        return state

    @property
    def trains_every_row(self) -> bool:
        """Whether the objective asks for groups without advantages too."""
        return getattr(self.scorer.objective, "trains_every_row", False)

    def pack(self, groups: Sequence[RolloutGroup], lag_of: Lags) -> Batch:
        """The groups of one update as `step` takes them; see `packing.pack`."""
        sharing = Sharing(self.ranks.size, self.model.even_length)
        return pack(groups, lag_of, self.config, every_row=self.trains_every_row, sharing=sharing)

    @property
    def vocabulary(self) -> int:
        """Token ids that can be trained are below this."""
        return self.model.vocabulary

    def _train(
        self,
        place: int,
        minibatch: MiniBatch,
        constants: list[StepConstants],
        tally: BatchTally,
        *,
        first_epoch: bool,
    ) -> None:
        """Takes one optimizer step, unless there is a reason against it."""
        scored, sums = [], []
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
                continue
            if is_trained:
                scored.append(part)
            scale = None if is_trained else minibatch.skipped_scale
            if first_epoch:
                tally.diagnose(place, microbatch, part, scale)
            sums.append(metric_sums(microbatch, part, self.config, first_epoch=first_epoch, scale=scale))
            tally.end_phase("diagnostics")
        self.ranks.phase = "optimizer"
        grad_norm = self._grad_norm()
        if tally.end_step(place, minibatch, scored, sums, grad_norm):
            self._update(grad_norm)
            self.num_steps += 1
        elif place in tally.failed:
            tally.blame(place, self._is_finite, minibatch)
        self.optimizer.zero_grad()
        tally.end_phase("optimizer")

    def _is_finite(self, minibatch: MiniBatch) -> bool:
        """Whether loss and gradient of a mini-batch are finite, by the present weights as the proximal policy."""
        self.optimizer.zero_grad()
        constants, total = self.scorer.constants(minibatch.microbatches), 0.0
        last = len(constants) - 1
        for number, microbatch in enumerate(minibatch.microbatches):
            loss, _ = self.scorer.score(microbatch.to(self.device), minibatch, constants[number])
            self._backward(loss, is_last=number == last)
            total += loss.item()
        total = self.ranks.add(torch.tensor(total, dtype=torch.float64)).item()
        return math.isfinite(total + self._grad_norm().item())

    def _backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.ranks.phase = "backward"
        self.model.reduce_gradients(is_last or self.config.trainer.gradient_accumulation == "sharded")
        loss.backward()

    def _grad_norm(self) -> Tensor:
        """Over the ranks."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _update(self, grad_norm: Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(
            self.model.parameters(), self.config.trainer.max_grad_norm, grad_norm, foreach=True
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, self.num_steps)
        self.before_update()
        self.optimizer.step()
