"""Every objective with each setting that changes its formula, and packed tokens to evaluate them on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.cispo import Cispo
from penstock.consumers.learning.objectives.dapo import Dapo
from penstock.consumers.learning.objectives.decoupled_ppo import DecoupledPpo
from penstock.consumers.learning.objectives.dppo import DppoKl, DppoTv
from penstock.consumers.learning.objectives.grpo import Grpo
from penstock.consumers.learning.objectives.gspo import Gspo
from penstock.consumers.learning.objectives.reinforce import Reinforce
from penstock.consumers.learning.objectives.sapo import Sapo
from penstock.consumers.learning.objectives.terms import PolicyObjective
from penstock.consumers.learning.objectives.tvpo import Tvpo

WIDE: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.1}

OBJECTIVES: dict[str, PolicyObjective] = {
    "grpo": Grpo(),
    "grpo dual sequence": Grpo(dual_clip=1.3, aggregation="sequence"),
    "grpo constant k1": Grpo(
        aggregation="constant",
        constant_denominator=16.0,
        kl_coefficient=0.3,
        kl_estimator="k1",
        entropy_coefficient=0.1,
    ),
    "dapo k2": Dapo(kl_coefficient=0.2, kl_estimator="k2"),
    "gspo": Gspo(**WIDE),
    "gspo paper": Gspo(),
    "gspo token k3": Gspo(gradient="token", kl_coefficient=0.1, entropy_coefficient=0.2, **WIDE),
    "gspo token mean": Gspo(aggregation="token", dual_clip=1.2, **WIDE),
    "cispo": Cispo(clip_high=0.2),
    "cispo both sides k3": Cispo(clip_low=0.2, clip_high=0.2, kl_coefficient=0.5),
    "reinforce": Reinforce(ratio_cap=1.2),
    "reinforce constant": Reinforce(aggregation="constant", constant_denominator=8.0, entropy_coefficient=0.1),
    "sapo": Sapo(),
    "sapo token k3": Sapo(temperature_negative=2.0, aggregation="token", kl_coefficient=0.1),
    "decoupled": DecoupledPpo(),
    "decoupled loglinear": DecoupledPpo(proximal="loglinear", total_weight_cap=1.5),
    "decoupled linear": DecoupledPpo(proximal="linear", total_weight_cap=2.0, dual_clip=2.0, aggregation="sequence"),
    "dppo tv": DppoTv(bound_low=0.02, bound_high=0.05),
    "dppo kl sampler": DppoKl(bound_low=0.005, behavior_kl_coefficient=0.3, aggregation="sequence"),
    "tvpo": Tvpo(bound=0.3),
    "grpo sampler": Grpo(behavior_kl_coefficient=0.2, kl_coefficient=0.1),
}


def packed_inputs(
    seed: int,
    lengths: Sequence[int] = (3, 1, 4, 2),
    *,
    drift: float = 0.4,
    kept: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """Returns random inputs with rows of these lengths; every second row belongs to the rollout of the row before it.

    Args:
        drift: standard deviation of the log-ratios between the policies.
        kept: share of the tokens that the mask keeps.
    """
    generator = torch.Generator().manual_seed(seed)
    m = sum(lengths)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(m, generator=generator, dtype=dtype)

    row_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens_by_rollout = torch.bincount(row_ids // 2)
    # Below 0, so that every logprob can move in both directions.
    proximal = -0.1 - 4 * torch.rand(m, generator=generator, dtype=dtype)
    return LossInputs(
        current_logprobs=(proximal + normal(drift)).requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=proximal + normal(drift),
        importance_weights=2 * torch.rand(m, generator=generator, dtype=dtype),
        advantages=normal(),
        loss_mask=torch.rand(m, generator=generator, dtype=dtype) < kept,
        entropy=torch.rand(m, generator=generator, dtype=dtype).requires_grad_(),
        row_ids=row_ids,
        rollout_tokens=tokens_by_rollout[row_ids // 2].to(dtype),
        # The optimizer step has a few tokens and rollouts in other micro-batches.
        denominator=float(m + 5),
        num_rollouts=len(tokens_by_rollout) + 2,
        reference_logprobs=proximal + normal(drift),
        lag=torch.randint(0, 9, (m,), generator=generator),
    )


def changed(inputs: LossInputs, **changes: Any) -> LossInputs:
    """Returns `inputs` with some fields replaced."""
    return LossInputs(**(vars(inputs) | changes))


def selected(inputs: LossInputs, index: Tensor) -> LossInputs:
    """Selects the tokens of `index`, in that order; rows are renumbered in order of appearance."""
    tensors = {name: value[index] for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    rows = tensors["row_ids"]
    tensors["row_ids"] = torch.cat([rows.new_zeros(1), (rows[1:] != rows[:-1]).long().cumsum(0)])
    return changed(inputs, **tensors)


def poisoned(inputs: LossInputs, poison: float = float("nan")) -> LossInputs:
    """Returns `inputs` with `poison` where the mask is False."""
    names = ("proximal_logprobs", "behavior_logprobs", "importance_weights", "advantages", "reference_logprobs")
    leaves = ("current_logprobs", "entropy")
    values = {name: torch.where(inputs.loss_mask, getattr(inputs, name).detach(), poison) for name in names + leaves}
    if inputs.lag is not None:
        values["lag"] = torch.where(inputs.loss_mask, inputs.lag.to(inputs.advantages.dtype), poison)
    return changed(inputs, **values | {name: values[name].requires_grad_() for name in leaves})


def gradients(objective: PolicyObjective, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss and its gradients with respect to current logprobs and entropy, 0 where there is none."""
    loss = objective(inputs).loss
    leaves = inputs.current_logprobs, inputs.entropy
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    current, entropy = (torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))
    return loss.detach(), current, entropy
