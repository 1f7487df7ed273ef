"""Score centering: REINFORCE without the drift that a sampler other than the policy adds to every update.

Formula, of a sampled token y with advantage A, with p the current policy and q the one that sampled, H the sampler's k
likeliest ids, and a token's weight w(r) = clip(r, weight_low, weight_high)::

    gain = A * ( sg[w(p_y / q_y)] log p_y  -  sum_{v in H} sg[m_v - a p_v] log p_v )
    m_v  = q_v w(p_v / q_v)
    a    = s w(1 / s),    s = (1 - sum_{v in H} q_v) / (1 - sum_{v in H} p_v)

sum_v p_v grad log p_v is 0, but sum_v q_v w_v grad log p_v is not: it moves the policy in one direction whatever the
rewards are, as often as A is not 0 in the mean of a context. The sum subtracts it. Outside H the sampler is taken to be
the policy times s, whose part of the sum is -a sum_{v in H} p_v grad log p_v, so that H is all that is needed: exact
over the whole vocabulary, and for any H where p and q agree (both terms cancel).

With the default bounds, 1 and 1, w is 1: score centering alone. 0 and 2 compose it with truncated importance weights;
as the upper bound grows, w becomes p / q, m becomes p, and the sum 0, since importance weights leave no drift.

Source: Marek and Ryabinin, "Score Centering Stabilizes Off-policy Reinforcement Learning" (arXiv 2609.20807), read in
its abstract and in the derivation and code of vime (its experiment lab's docs, `score_centering_correction`); not
verified against the paper's own equations. The floor of the tails, 1e-6, is vime's from the paper's appendix A.3.

Departures: p is that of each optimizer step, for all steps on a batch. The mean over the tokens of the step is the
default (`aggregation`).

Peers: vime and miles the same with 128 ids; prime-rl over the ids that top-k or top-p left, without a tail. marin's
replication (#9291) found no difference to truncated importance weights.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.terms import PolicyObjective, bounded_exp, number

LEAST_TAIL = 1e-6
"""The least probability of all other ids together: sums of float32 probabilities say no more."""


@dataclass(frozen=True, kw_only=True)
class ScoreCentering(PolicyObjective):
    """See the module's docstring. Metrics: `sampler_tail`, the sampler's probability of the ids outside H, and
    `reference_kl`."""

    token_level: ClassVar[bool] = False
    reads_behavior: ClassVar[bool] = True
    needs_top_logprobs: ClassVar[bool] = True

    weight_low: float = number(1.0, at_least=0)
    weight_high: float = number(1.0, above=0)
    """A token's weight is current / behavior, clipped to [weight_low, weight_high]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_low > self.weight_high:
            raise self.refusal("weight_low", f"at most weight_high = {self.weight_high}")

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        top, sampler = inputs.top_current_logprobs, inputs.top_behavior_logprobs
        if top is None or sampler is None:
            raise ValueError(
                "ScoreCentering: top_current_logprobs is None, expected rollouts that were recorded with "
                "sampling.top_logprobs"
            )
        bounds = self.weight_low, self.weight_high
        weight = bounded_exp(inputs.current_logprobs.detach() - inputs.behavior_logprobs).clamp(*bounds)
        with torch.no_grad():
            p, q = top.double().exp(), sampler.double().exp()
            own_tail, tail = ((1 - each.sum(1, keepdim=True)).clamp(min=LEAST_TAIL) for each in (p, q))
            ratio = tail / own_tail
            drift = torch.clamp(p, q * bounds[0], q * bounds[1]) - p * torch.clamp(
                torch.ones_like(ratio), ratio * bounds[0], ratio * bounds[1]
            )
        centering = (drift.to(top.dtype) * top).sum(1)
        metrics = {"sampler_tail": torch.where(inputs.loss_mask, tail[:, 0], 0.0).sum()}
        return inputs.advantages * (weight * inputs.current_logprobs - centering), metrics
