"""Decoupled PPO: the clip is around a proximal policy, the weight corrects from the behavior policy to it.

Formula, with the proximal policy p, r = exp(current - p) and the weight w = f(exp(p - behavior)), without gradient::

    loss = aggregate(- w_t * min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t))

`proximal = "recomputed"`: p is the trainer's own policy when the batch is first read, and f the run's correction. Grpo
computes the same; the name is here for those who look for it.

`proximal = "loglinear"` or `"linear"` approximates p from the two known policies, with d the token's lag and
a = max(d - 1, 0) / d (0 at d = 0), the current policy without gradient::

    loglinear   p = (1 - a) * behavior + a * current
    linear      p = log((1 - a) * exp(behavior) + a * exp(current))

Then r = (current / behavior)^(1 / d) for "loglinear": the clip alone would let the total weight w * r = current /
behavior run from (1 - clip_low)^d to (1 + clip_high)^d. So f is here a cap on that total, which these forms require::

    w = exp(p - behavior) * min(1, total_weight_cap / exp(current - behavior))

Such a loss corrects for the gap itself; the run's correction must be off (`reads_behavior`).

Source: Hilton et al. (arXiv 2110.00641, section 3); AReaL (arXiv 2505.24298, eq. 5); the interpolation AReaL's
`prox_logp_method`.

Departures: the cap on the total weight, where AReaL masks tokens by exp(p - behavior); "linear" in logarithms, where
AReaL adds 1e-10 to the probability. At lag 0 the proximal policy is the behavior policy, as in AReaL: the clip then
acts on the mismatch of engine and trainer.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.clip import ClippedObjective
from penstock.consumers.learning.objectives.terms import bounded_exp, choice, number, policy_ratio


@dataclass(frozen=True, kw_only=True)
class DecoupledPpo(ClippedObjective):
    """See the module's docstring.

    Metrics: those of `ClippedObjective.clipped`; `total_weight_capped_frac`, the tokens whose current / behavior is
    above the cap, for an interpolated proximal policy; `reference_kl`.

    Raises:
        ValueError: on construction, an argument out of range or missing; when called, an interpolation without lags.
    """

    proximal: str = choice("recomputed", ("recomputed", "loglinear", "linear"))
    """"recomputed", "loglinear" or "linear"."""
    total_weight_cap: float | None = number(None, at_least=1)
    """Largest current / behavior, 1 or more; required by, and for, an interpolated proximal policy."""

    @property
    def reads_behavior(self) -> bool:
        return self.proximal != "recomputed"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads_behavior and self.total_weight_cap is None:
            raise self.refusal("total_weight_cap")
        if not self.reads_behavior and self.total_weight_cap is not None:
            raise self.refusal(
                "total_weight_cap", "None with proximal 'recomputed', where the correction has the bound"
            )

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        if self.total_weight_cap is None:
            return self.clipped(policy_ratio(inputs), inputs.advantages)
        if inputs.lag is None:
            raise ValueError(f"DecoupledPpo: lag is None with proximal = {self.proximal!r}, expected each token's lag")
        proximal = interpolated_proximal(inputs.behavior_logprobs, inputs.current_logprobs, inputs.lag, self.proximal)
        log_ratio = inputs.current_logprobs - proximal
        # The total is bounded in logarithms: neither factor is formed before its bound is known.
        room = math.log(self.total_weight_cap) - log_ratio.detach()
        log_weight = proximal - inputs.behavior_logprobs
        gain, metrics = self.clipped(bounded_exp(log_ratio), inputs.advantages)
        metrics["total_weight_capped_frac"] = (log_weight > room).sum()
        return bounded_exp(torch.minimum(log_weight, room)) * gain, metrics


def interpolated_proximal(behavior_logprobs: Tensor, current_logprobs: Tensor, lag: Tensor, method: str) -> Tensor:
    """Approximates the proximal logprobs (see the module's docstring).

    Args:
        behavior_logprobs, current_logprobs: natural logarithms, of one shape and floating type.
        lag: optimizer steps, 0 or more, same shape.
        method: "loglinear" or "linear".

    Returns:
        Like `behavior_logprobs`, detached.
    """
    current, lag = current_logprobs.detach(), lag.to(current_logprobs.dtype)
    share = (lag - 1).clamp(min=0) / lag.clamp(min=1)
    if method == "loglinear":
        return behavior_logprobs + share * (current - behavior_logprobs)
    return torch.logaddexp(torch.log1p(-share) + behavior_logprobs, torch.log(share) + current)
