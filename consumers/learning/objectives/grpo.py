"""GRPO with PPO's clipped ratio, on importance-corrected tokens.

Formula, over the sampled tokens t of an optimizer step, with r = exp(current - proximal) and the advantage A::

    loss = aggregate(- w_t * min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t))

`w = f(exp(proximal - behavior))` is the importance weight; it corrects what the engine and the lag did and carries no
gradient. Dual clip: `clip.py` here. Aggregation, KL and entropy: `terms.py` here.

Source: DeepSeekMath (arXiv 2402.03300, eq. 3).

Departures from the paper: the weight w, which the paper's on-policy setting does not need; the mean over all tokens of
the step by default, as in DAPO, verl, AReaL and NeMo RL, where the paper, slime, and TRL's and ms-swift's `grpo` take
the mean of each rollout first (`aggregation = "sequence"`); no KL against a reference model by default
(`kl_coefficient`, the paper's beta, with `kl_estimator = "k3"`).
"""

from dataclasses import dataclass

from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.clip import ClippedObjective
from penstock.consumers.learning.objectives.terms import policy_ratio


@dataclass(frozen=True, kw_only=True)
class Grpo(ClippedObjective):
    """See the module's docstring. Metrics: those of `ClippedObjective.clipped`, and `reference_kl`."""

    def gain(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return self.clipped(policy_ratio(inputs), inputs.advantages)
