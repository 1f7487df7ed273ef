"""REINFORCE with truncated importance weights.

Formula, with r = exp(current - proximal) and stop() without gradient::

    loss = aggregate(- w_t * stop(min(r_t, ratio_cap)) * A_t * current_t)

If a batch makes one optimizer step, r is 1 and w is the whole weight. With `correction.bypass` the trainer passes the
behavior policy as the proximal one and weights of 1: r is then current / behavior, and this is PipelineRL's default.

Source: Williams (1992) with the truncated weight of PipelineRL (arXiv 2509.19128, section 2, cap c = 5).

Departures: none in bypass mode but the denominators, which are counted before masking.

Peers: PipelineRL's `policy_loss: reinforce` caps at 1 + epsilon_high, 1.2 in its configuration files, 5 in its paper;
verl's bypass mode with `loss_type = "reinforce"` at `rollout_is_threshold`. CISPO without a lower bound is the same
formula; the two files differ in name, cap and what their users expect.
"""

from dataclasses import dataclass

from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.terms import PolicyObjective, number, policy_ratio


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyObjective):
    """See the module's docstring. Metrics: `policy_clipped_frac`, the tokens of a truncated ratio; `reference_kl`."""

    ratio_cap: float = number(5.0, at_least=1)
    """Largest factor of the policy ratio; 1 or more."""

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = policy_ratio(inputs).detach()
        metrics = {"policy_clipped_frac": (ratio > self.ratio_cap).sum()}
        return ratio.clamp(max=self.ratio_cap) * inputs.advantages * inputs.current_logprobs, metrics
