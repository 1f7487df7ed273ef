"""DPPO: a token is masked once its probability has moved too far from the sampler's; no ratio is clipped.

Formula: that of `trust_region.py` here, with p and q the sampled token's probabilities under the current and the
behavior policy, and one of two divergences of "this token or any other"::

    DppoTv   D = |p - q|                                                   the total variation
    DppoKl   D = q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))         KL(behavior || current)

PPO's clip judges a rare token by its ratio, which noise alone moves out of the bounds, and lets a likely one move by a
fifth of everything. This mask does neither. It is anchored at the behavior policy: the objective forms current /
behavior itself, and the run's correction must be off (`reads_behavior`).

Source: DPPO (arXiv 2602.04879, eq. 11 to 14, by the numbers that open-instruct's pull request 1755 gives them), read in
that pull request and in the authors' code, sail-sg/Stable-RL; not verified against the paper itself. The bounds are
those of open-instruct; 0.2 is prime-rl's and verl's too.

Departures: 1 - p and 1 - q are 1e-8 or more, where the authors' code adds 1e-8 to both.

Peers: prime-rl's default loss is `DppoTv(behavior_kl_coefficient=1e-3)`. The gradients of the authors' code, verl and
slime (`dppo_tv`, `dppo_binary_tv`, ...) are these up to their cap of the ratio, 10 or 20.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.terms import PolicyObjective, number
from penstock.consumers.learning.objectives.trust_region import trusted_gain

LEAST_REST = 1e-8
"""The least probability of every other token: a float32 logprob of 0 says no more."""


@dataclass(frozen=True, kw_only=True)
class DppoTv(PolicyObjective):
    """See the module's docstring. Metrics: those of `trusted_gain`, and `reference_kl`."""

    reads_behavior: ClassVar[bool] = True

    bound_low: float = number(0.2, above=0)
    """Largest divergence by which a token of negative advantage may have become less likely."""
    bound_high: float = number(0.2, above=0)
    """Largest divergence by which a token of positive advantage may have become more likely."""

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        far = self.divergence(inputs.current_logprobs.detach().double(), inputs.behavior_logprobs.double())
        return trusted_gain(inputs, far, low=self.bound_low, high=self.bound_high)

    def divergence(self, current: Tensor, behavior: Tensor) -> Tensor:
        """Returns [M] float64 from logprobs [M] float64."""
        return (current.exp() - behavior.exp()).abs()


@dataclass(frozen=True, kw_only=True)
class DppoKl(DppoTv):
    """DppoTv by the other divergence."""

    bound_low: float = number(0.05, above=0)
    bound_high: float = number(0.05, above=0)

    def divergence(self, current: Tensor, behavior: Tensor) -> Tensor:
        rest_p, rest_q = (-torch.expm1(each).clamp(max=-LEAST_REST) for each in (current, behavior))
        return behavior.exp() * (behavior - current) + rest_q * (rest_q / rest_p).log()
