"""SAPO: a smooth gate in place of PPO's clip.

Formula, with r = exp(current - proximal), tau = temperature_positive where A > 0, else temperature_negative::

    loss = aggregate(- w_t * (4 / tau) * sigmoid(tau * (r_t - 1)) * A_t)

The gate's slope is 1 at r = 1, where the gradient is the policy gradient's, and falls off to both sides; a larger tau
on the negative side lets go of those tokens earlier.

Source: Soft Adaptive Policy Optimization (arXiv 2511.20347, eq. 5 and 6; tau 1.0 and 1.05).

Departures from the paper: the importance weight w. The value of the loss is 2 / tau * A, not A, at r = 1, as in the
paper: only its gradient means something. Default aggregation is the paper's mean of each rollout.

Peers: verl, TRL, ms-swift and AReaL compute the same; AReaL without importance weights and with the token mean only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.terms import AGGREGATIONS, PolicyObjective, choice, number, policy_ratio


@dataclass(frozen=True, kw_only=True)
class Sapo(PolicyObjective):
    """See the module's docstring. Metrics: `reference_kl`; nothing is clipped."""

    temperature_positive: float = number(1.0, above=0)
    temperature_negative: float = number(1.05, above=0)
    aggregation: str = choice("sequence", AGGREGATIONS)

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        advantages = inputs.advantages
        temperature = torch.full_like(advantages, self.temperature_negative)
        temperature = temperature.masked_fill(advantages > 0, self.temperature_positive)
        gate = torch.sigmoid(temperature * (policy_ratio(inputs) - 1)) * 4 / temperature
        return gate * advantages, {}
