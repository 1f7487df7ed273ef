"""DAPO: GRPO's clipped ratio with a higher upper bound and the mean over tokens.

Formula, with r = exp(current - proximal)::

    loss = - sum_t  w_t * min(r_t * A_t, clip(r_t, 1 - 0.2, 1 + 0.28) * A_t)  /  tokens of the optimizer step

Source: DAPO (arXiv 2503.14476, eq. 8 to 12): clip-higher, the token-level mean, no KL to a reference.

Departures from the paper: the importance weight w, as in Grpo. Two of the paper's four parts are not of the loss:
groups without variance, which the paper samples again, are counted and skipped by the trainer; the penalty on overlong
rollouts belongs into the reward. The paper has no dual clip; verl's recipe sets it to 10 (`dual_clip = 10`).

Peers: TRL and ms-swift call the token-level mean `loss_type = "dapo"`, whatever the clip.
"""

from dataclasses import dataclass

from penstock.consumers.learning.objectives.grpo import Grpo
from penstock.consumers.learning.objectives.terms import number


@dataclass(frozen=True, kw_only=True)
class Dapo(Grpo):
    """See the module's docstring; settings and metrics are Grpo's."""

    clip_high: float = number(0.28, above=0)
