"""CISPO: the policy gradient of every token, weighed by its clipped ratio, which carries no gradient.

Formula, with r = exp(current - proximal) and stop() without gradient::

    loss = aggregate(- w_t * stop(clip(r_t, 1 - clip_low, 1 + clip_high)) * A_t * current_t)

The largest weight is 1 + clip_high. No token is cut off as PPO's clip does: its gradient is bounded and stays.

Source: CISPO of MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). As in the paper's experiments there is no lower bound by
default (clip_low = 1). The paper does not print clip_high; the default of 4, a cap of 5, is the value that ms-swift's
and TRL's pages recommend and one that ScaleRL (arXiv 2510.13786) finds good.

Departures from the paper: the importance weight w.

Peers: verl, NeMo RL and slime take clip_high as here. ms-swift and TRL take the cap itself: their `epsilon_high = 5.0`
is `clip_high = 4.0` here.
"""

from dataclasses import dataclass

from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.terms import PolicyObjective, number, policy_ratio


@dataclass(frozen=True, kw_only=True)
class Cispo(PolicyObjective):
    """See the module's docstring.

    Metrics: `policy_clipped_frac`, the tokens whose ratio was clipped whatever the advantage's sign, the sum of
    `policy_clipped_low_frac` and `policy_clipped_high_frac`; `reference_kl`.
    """

    clip_low: float = number(1.0, above=0, at_most=1)
    """The ratio's lower bound is 1 - clip_low; 1 for none."""
    clip_high: float = number(4.0, above=0)
    """The ratio's upper bound is 1 + clip_high."""

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = policy_ratio(inputs).detach()
        floor, cap = 1 - self.clip_low, 1 + self.clip_high
        low, high = (ratio < floor).sum(), (ratio > cap).sum()
        metrics = {
            "policy_clipped_frac": low + high,
            "policy_clipped_low_frac": low,
            "policy_clipped_high_frac": high,
        }
        return ratio.clamp(floor, cap) * inputs.advantages * inputs.current_logprobs, metrics
