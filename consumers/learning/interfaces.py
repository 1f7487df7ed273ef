"""The objective: its inputs, its outputs, its Protocol, and the settings that fit it."""

from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from torch import Tensor

from penstock.schemas.config import ConfigError, CorrectionConfig, RunConfig
from penstock.schemas.process.plugins import resolve


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The sampled tokens of one micro-batch, M of them; all floats float32, natural logarithms.

    A row is one token sequence of a rollout (normally the whole rollout); its tokens lie next to each other, in order.
    Only `current_logprobs` and `entropy` carry a gradient. Values under a False `loss_mask` may be anything, even NaN.
    """

    current_logprobs: Tensor
    """[M], the policy under gradient."""
    proximal_logprobs: Tensor
    """[M], the trainer's recomputation: the policy before the first update on the batch, or the version that sampled
    the token (`correction.proximal`)."""
    behavior_logprobs: Tensor
    """[M], the policies that sampled the tokens."""
    importance_weights: Tensor
    """[M], trust in exp(proximal - behavior), detached; 0 where `loss_mask` is False."""
    advantages: Tensor
    """[M], the rollout's advantage on each of its tokens; with a teacher (teacher.py) each token's own."""
    loss_mask: Tensor
    """[M] bool, True where the token may reach the loss: within the lag bound and kept by the correction."""
    entropy: Tensor
    """[M], of the current policy in nats."""
    row_ids: Tensor
    """[M] int64, ascending: the row of each token within this micro-batch."""
    rollout_tokens: Tensor
    """[M], the sampled tokens of the token's whole rollout, counted before masking."""
    denominator: float
    """Sampled tokens of the whole optimizer step, counted before masking, groups without variance included."""
    num_rollouts: int
    """Rollouts of the whole optimizer step, counted likewise."""
    reference_logprobs: Tensor | None = None
    """[M], the frozen reference model's, detached; None if the run has no reference model."""
    lag: Tensor | None = None
    """[M], optimizer steps between the policy that sampled the token and the trainer's, 0 or more."""
    top_current_logprobs: Tensor | None = None
    """[M, K], the current policy's at the K ids that were likeliest where the token was sampled, under gradient; None
    unless the objective needs them."""
    top_behavior_logprobs: Tensor | None = None
    """[M, K], the sampling policies' at the same ids."""


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """loss: scalar under gradient, already divided by a step-wide denominator, so that micro-batches simply add.

    metrics: scalars, detached: sums over the unmasked tokens of the micro-batch. The trainer adds them up, divides by
    the batch's tokens within the lag bound and reports them under these names.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """The loss of a policy update: a pure function of tensors. Constructed with the run file's keyword arguments.

    Attributes of the class or of the object tell the trainer about it. A missing one counts as False, or as None:

    token_level: True promises that a token's part of the loss depends on that token's own inputs and on the batch-wide
        denominators only, so that its gradient can be taken while the head's logits are in memory.
    needs_reference: True asks for `LossInputs.reference_logprobs`.
    needs_top_logprobs: True asks for `LossInputs.top_current_logprobs` and `top_behavior_logprobs`, which the engine
        returns by `sampling.top_logprobs`. Not together with `token_level`.
    reads_behavior: True if the objective itself forms exp(current - behavior) or interpolates between the two. An
        importance weight would count one gap twice, so the trainer refuses a correction with it.
    trains_every_row: True if the loss has terms that are not 0 where every advantage is 0, such as a KL to the
        reference or an entropy bonus: groups without reward variance are then trained on like the others.
    bypasses: True if current / proximal becomes current / behavior in a run that does not say otherwise, and the
        objective's clip the correction (`settled_correction`).
    full_rate_ess: the share of effective rows, above 0 and up to 1, below which a step has a lower learning rate (see
        `penstock.consumers.learning.loss.ess`); None: every step has the schedule's.
    """

    def __call__(self, inputs: LossInputs) -> LossOutputs: ...


def settled_correction(config: RunConfig, objective: Objective) -> CorrectionConfig:
    """Returns the run's correction with a mode: what `correction.mode` None means for this objective."""
    correction = config.correction
    if correction.mode is not None:
        return correction
    if getattr(objective, "reads_behavior", False) or correction.bypass:
        return msgspec.structs.replace(correction, mode="none")
    if getattr(objective, "bypasses", False) and correction.proximal == "consumed":
        return msgspec.structs.replace(correction, mode="none", bypass=True)
    return msgspec.structs.replace(correction, mode="token_truncate")


def check_objective(config: RunConfig, objective: Objective) -> None:
    """Raises ConfigError if objective and correction conflict, or if a reference model is set that nothing reads."""
    correction = config.correction
    if getattr(objective, "reads_behavior", False) and (correction.mode not in (None, "none") or correction.bypass):
        setting = "correction.bypass = true" if correction.bypass else f"correction.mode = {correction.mode!r}"
        raise ConfigError(
            f"objective.path = {config.objective.path!r} with {setting}: this objective forms current / behavior "
            "itself, and the gap would be counted twice; expected correction.mode = 'none' without bypass"
        )
    if getattr(objective, "reads_behavior", False) and correction.proximal != "consumed":
        raise ConfigError(
            f"correction.proximal = {correction.proximal!r} with objective.path = {config.objective.path!r}: this "
            "objective forms current / behavior itself; expected 'consumed'"
        )
    reads_top, top = getattr(objective, "needs_top_logprobs", False), config.sampling.top_logprobs
    if reads_top != (top > 0):
        raise ConfigError(
            f"sampling.top_logprobs = {top} with objective.path = {config.objective.path!r}: this objective "
            + ("reads the likeliest ids; expected 1 or more" if reads_top else "does not read them; expected 0")
        )
    measures_norms = getattr(resolve(config.advantage, "advantage"), "needs_squared_norms", False)
    if measures_norms and (config.teacher is not None or getattr(objective, "trains_every_row", False)):
        raise ConfigError(
            f"advantage.path = {config.advantage.path!r} with a [teacher] or terms of the objective that need no "
            "advantage (KL, entropy): its baseline is of rewards alone; expected neither"
        )
    share = getattr(objective, "full_rate_ess", None)
    if not (share is None or (isinstance(share, int | float) and 0 < share <= 1)):
        raise ConfigError(
            f"objective.path = {config.objective.path!r}: its full_rate_ess is {share!r}, expected a share above 0 and "
            "up to 1, or None"
        )
    reads_reference = getattr(objective, "needs_reference", False) or config.advantage.kl_coefficient > 0
    if config.model.reference is not None and not reads_reference:
        raise ConfigError(
            f"model.reference = {config.model.reference!r}: the objective {config.objective.path!r} has no KL "
            "term that reads it; expected it to be left out, or a KL coefficient above 0"
        )
