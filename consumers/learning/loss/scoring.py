"""Scores packed tokens: the policy's logprobs, the correction of the behavior policy, the objective's loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.consumers.learning.batch.batch import Batch, MicroBatch, MiniBatch, Support
from penstock.consumers.learning.batch.images import Sees
from penstock.consumers.learning.batch.layout import Arrangement
from penstock.consumers.learning.interfaces import (
    LossInputs,
    LossOutputs,
    Objective,
    check_objective,
    settled_correction,
)
from penstock.consumers.learning.loss.importance import Correction, correct_packed
from penstock.consumers.learning.loss.reward_kl import penalized
from penstock.consumers.learning.loss.sampled_version import Recomputed, SampledVersions
from penstock.consumers.learning.loss.teacher import open_teacher, teacher_advantages
from penstock.consumers.learning.model.head import OutputHead, further_logprobs, selected_logprobs
from penstock.consumers.learning.model.head_kernels import TokenGrads
from penstock.consumers.learning.model.packed_model import BaseOfAdapter, PackedModel
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError, RunConfig

_ALL = slice(None)


@dataclass(frozen=True)
class StepConstants:
    """Values of a micro-batch that are constant over the optimizer steps of its batch; [M] float32 each.

    proximal_logprobs: None if the batch makes one optimizer step: the current policy is the proximal one then.
    reference_logprobs: None for an objective without a KL term.
    teacher_logprobs: None without a teacher.
    sampled: with `correction.proximal = "sampled_version"`, the logprobs that the objective and the correction get as
        proximal ones instead. KL in the reward and a teacher's advantages stay those of the policy before the step.
    """

    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    sampled: Recomputed | None = None

    @property
    def divergence(self) -> Tensor:
        """proximal - reference logprobs, [M] float64 on CPU, if both were computed."""
        assert self.proximal_logprobs is not None and self.reference_logprobs is not None
        return self.proximal_logprobs.cpu().double() - self.reference_logprobs.cpu().double()


@dataclass(frozen=True)
class Scored:
    """The detached results of a micro-batch with M sampled tokens.

    proximal_logprobs: of the trainer's policy before the first step on the batch, in bypass mode too; with
        `correction.proximal = "sampled_version"` of the version that sampled each token.
    recomputed: [M] bool, the tokens of older versions that those are recomputed under; None without that setting.
    advantages: including the teacher's part, if there is a teacher.
    teacher_divergence: proximal - teacher logprobs; None without a teacher.
    """

    loss: Tensor
    proximal_logprobs: Tensor
    current_logprobs: Tensor
    entropy: Tensor
    correction: Correction
    metrics: dict[str, Tensor]
    advantages: Tensor
    teacher_divergence: Tensor | None = None
    recomputed: Tensor | None = None


class TokenScorer:
    """Turns micro-batches into losses.

    `weight = f(proximal / behavior)` is the correction's, `ratio = current / proximal` the objective's. In bypass mode
    the objective gets the behavior policy in place of the proximal one, and weights of 1.

    Raises:
        ConfigError: settings that would count the gap between engine and trainer twice, or ask for a reference model
            that nothing reads.
    """

    def __init__(
        self, config: RunConfig, model: PackedModel, objective: Objective, device: torch.device, ranks: Ranks
    ) -> None:
        check_objective(config, objective)
        self.objective = objective
        self._ranks = ranks
        self._model = model
        self._device = device
        self._steps_per_batch = config.steps_per_batch
        self._correction = settled_correction(config, objective)
        self._advantage = config.advantage
        self._teaching = config.teacher
        self._reads_top = bool(getattr(objective, "needs_top_logprobs", False))
        self._teacher = open_teacher(config, model, device, ranks)
        self.sampled: SampledVersions | None = None
        """Recomputes proximal logprobs under the versions that sampled the tokens, if the run says so."""
        if config.correction.proximal == "sampled_version":
            self.sampled = SampledVersions(model, ranks, device, lambda microbatch: self.logprobs(microbatch)[0])
        self.reference: PackedModel | BaseOfAdapter | None = None
        """The model of the KL term, frozen; None without one."""
        if not (getattr(objective, "needs_reference", False) or config.advantage.kl_coefficient):
            return
        if config.lora is not None and config.model.reference is None:
            self.reference = BaseOfAdapter(model)
        else:
            self.reference = PackedModel(
                config.model.reference or config.model.path, config.model.dtype, device, ranks,
                compiled=config.trainer.compile, frozen=True,
                field="model.reference" if config.model.reference else "model.path",
                max_model_len=config.engine.max_model_len,
                replays_routes=config.model.replay_routes and config.model.reference is None,
                by_expert=config.trainer.expert_parallel, per_pass=config.trainer.context_parallel,
            )  # fmt: skip
            if self.reference.vocabulary != model.vocabulary:
                raise ConfigError(
                    f"model.reference = {config.model.reference!r}: a vocabulary of {self.reference.vocabulary}, "
                    f"expected the model's {model.vocabulary}"
                )

    def step_constants(self, batch: Batch) -> tuple[Batch, list[list[StepConstants]]]:
        """Computes the constants before the first optimizer step: per mini-batch for its micro-batches, then `skipped`.

        Returns the batch, with new advantages if there is KL in the reward, and the constants.
        """
        of_trained = self.constants(batch.microbatches)
        if self._advantage.kl_coefficient:
            batch = penalized(batch, [each.divergence for each in of_trained], self._advantage, self._ranks)
        trained = iter(of_trained)
        skipped = iter(self.constants([each for minibatch in batch.minibatches for each in minibatch.skipped]))
        return batch, [
            [*islice(trained, len(each.microbatches)), *islice(skipped, len(each.skipped))]
            for each in batch.minibatches
        ]

    @property
    def sees(self) -> Sees | None:
        """What images in rows must be for the trained model; None if it, or another of a batch, can be shown none."""
        models = (self._model, self.reference, self._teacher)
        blind = any(model.vision is None for model in models if isinstance(model, PackedModel))
        return None if blind else self._model.vision

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement of rows that the trained model and the others of a batch can run."""
        models = (self._model, self.reference, self._teacher)
        found = {model.arrangement for model in models if isinstance(model, PackedModel)}
        return max(found, key=get_args(Arrangement).index)

    @torch.no_grad()
    def constants(self, microbatches: Sequence[MicroBatch]) -> list[StepConstants]:
        """Computes the logprobs of the proximal policy, the reference and the teacher, as far as they are needed."""
        needs_proximal = self._steps_per_batch > 1 or self._advantage.kl_coefficient > 0
        if not (needs_proximal or self.reference or self._teaching or self.sampled):
            return [StepConstants()] * len(microbatches)
        constants = []
        sampled = self.sampled.recompute(microbatches) if self.sampled else [None] * len(microbatches)
        for cpu_microbatch, recomputed in zip(microbatches, sampled, strict=True):
            microbatch = cpu_microbatch.to(self._device)
            constants.append(
                StepConstants(
                    self.logprobs(microbatch)[0] if needs_proximal else None,
                    self.logprobs(microbatch, self.reference)[0] if self.reference else None,
                    self._teacher_logprobs(microbatch),
                    recomputed,
                )
            )
        return constants

    def score(
        self, microbatch: MicroBatch, minibatch: MiniBatch, constants: StepConstants
    ) -> tuple[Tensor, Scored | None]:
        """Returns the micro-batch's share of the mini-batch's loss, under gradient, and its detached values.

        For an idle micro-batch: a loss of 0 with gradients of 0, and None.
        """
        if microbatch.is_idle:
            return self._idle_loss(microbatch), None

        def outputs(
            part: slice, current: Tensor, entropy: Tensor, top: Tensor | None = None
        ) -> tuple[LossOutputs, Tensor, Tensor, Correction]:
            return self._outputs(microbatch, minibatch, constants, part, current, entropy, top)

        token_level = getattr(self.objective, "token_level", False) and self._correction.is_token_level
        token_grads = _token_grads(outputs) if token_level and torch.is_grad_enabled() else None
        hidden, head = self._model.forward(microbatch)
        current, entropy = head_logprobs(hidden, head, microbatch, token_grads=token_grads)
        top = None
        if self._reads_top and microbatch.top is not None:
            predicting = F.embedding(microbatch.predicting, hidden), head, microbatch.targets, microbatch.temperature
            top = further_logprobs(*predicting, current, microbatch.top.ids)
        result, before, proximal, correction = outputs(_ALL, current, entropy, top)
        scored = Scored(
            result.loss.detach(),
            proximal,
            current.detach(),
            entropy.detach(),
            correction,
            result.metrics,
            self._advantages(microbatch, constants, _ALL, before),
            None if constants.teacher_logprobs is None else before - constants.teacher_logprobs,
            None if constants.sampled is None else constants.sampled.known,
        )
        return result.loss, scored

    def cross_entropy(self, microbatch: MicroBatch, num_tokens: int) -> Tensor:
        """Returns the micro-batch's share of the mean negative logprob of `num_tokens` tokens, under gradient."""
        if microbatch.is_idle:
            return self._idle_loss(microbatch)
        return -self.logprobs(microbatch)[0].sum() / num_tokens

    def _idle_loss(self, microbatch: MicroBatch) -> Tensor:
        hidden, head = self._model.forward(microbatch)
        return (hidden.sum(dtype=torch.float32) + head.weight.sum(dtype=torch.float32)) * 0.0

    def logprobs(
        self,
        microbatch: MicroBatch,
        model: PackedModel | BaseOfAdapter | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sampled tokens' logprobs and entropies, [M] float32 each, under the trained or another model."""
        hidden, head = (model or self._model).forward(microbatch)
        if microbatch.is_idle:
            return microbatch.temperature, microbatch.temperature
        return head_logprobs(hidden, head, microbatch)

    def _outputs(
        self,
        microbatch: MicroBatch,
        minibatch: MiniBatch,
        constants: StepConstants,
        part: slice,
        current: Tensor,
        entropy: Tensor,
        top: Tensor | None,
    ) -> tuple[LossOutputs, Tensor, Tensor, Correction]:
        """Applies the objective to the tokens of `part`, whose `current` and `entropy` are given; returns also the
        logprobs of the policy before the first step and the proximal ones."""
        before = current.detach() if constants.proximal_logprobs is None else constants.proximal_logprobs[part]
        proximal = before if constants.sampled is None else constants.sampled.instead_of(before, part)
        advantages = self._advantages(microbatch, constants, part, before)
        behavior, row_ids, lag = microbatch.behavior_logprobs[part], microbatch.row_ids[part], microbatch.lag[part]
        correction = correct_packed(
            proximal,
            behavior,
            microbatch.loss_mask[part],
            lag,
            row_ids,
            self._correction,
            advantages=advantages,
            current_logprobs=current.detach(),
        )
        inputs = LossInputs(
            current_logprobs=current,
            proximal_logprobs=behavior if self._correction.bypass else proximal,
            behavior_logprobs=behavior,
            importance_weights=correction.weights,
            advantages=advantages,
            loss_mask=correction.keep_mask,
            entropy=entropy,
            row_ids=row_ids,
            rollout_tokens=microbatch.rollout_tokens[part],
            denominator=float(minibatch.num_tokens),
            num_rollouts=minibatch.num_rollouts,
            reference_logprobs=None if constants.reference_logprobs is None else constants.reference_logprobs[part],
            lag=lag,
            top_current_logprobs=top,
            top_behavior_logprobs=None if top is None or microbatch.top is None else microbatch.top.behavior_logprobs,
        )
        return self.objective(inputs), before, proximal, correction

    def _teacher_logprobs(self, microbatch: MicroBatch) -> Tensor | None:
        if self._teacher is not None:
            return self.logprobs(microbatch, self._teacher)[0]
        return None if self._teaching is None else microbatch.teacher_logprobs

    def _advantages(self, microbatch: MicroBatch, constants: StepConstants, part: slice, before: Tensor) -> Tensor:
        if self._teaching is None or constants.teacher_logprobs is None:
            return microbatch.advantages[part]
        teacher = constants.teacher_logprobs[part]
        return teacher_advantages(microbatch.advantages[part], teacher, before, self._teaching)


class SampledTokens(Protocol):
    """The fields of a `MicroBatch` that the head needs."""

    @property
    def predicting(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def temperature(self) -> Tensor: ...
    @property
    def support(self) -> Support | None: ...


def head_logprobs(
    hidden: Tensor, head: OutputHead, sampled: SampledTokens, *, token_grads: TokenGrads | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the sampled tokens' logprobs and entropies, [M] float32 each, from `PackedModel.forward`'s results."""
    return selected_logprobs(
        F.embedding(sampled.predicting, hidden),
        head.weight,
        sampled.targets,
        sampled.temperature,
        softcap=head.softcap,
        support=sampled.support,
        token_grads=token_grads,
    )


def _token_grads(outputs: Callable[[slice, Tensor, Tensor], Any]) -> TokenGrads:
    """Returns a function that gives the head the loss's derivatives by a slice's logprobs and entropies."""

    def grads(part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            leaves = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
            found = torch.autograd.grad(outputs(part, *leaves)[0].loss, leaves, allow_unused=True)
        return torch.zeros_like(logprobs) if found[0] is None else found[0], found[1]

    return grads
