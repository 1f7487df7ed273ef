"""PPO's clipped gain of a ratio, shared by the objectives that clip.

Formula, with the ratio r and the advantage A::

    gain = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A);     where A < 0, with a dual clip c: max(gain, c * A)

Source: PPO (arXiv 1707.06347, eq. 7); the asymmetric bounds DAPO (arXiv 2503.14476, eq. 10), the dual clip Ye et al.
(arXiv 1912.09729, eq. 5).

Peers: all clip this way. The dual clip acts on the side of negative advantages only, where r has no upper bound: verl's
`clip_ratio_c`, AReaL's `c_clip`, NeMo RL's `ratio_clip_c`; ms-swift's and TRL's `delta` caps the unclipped r instead,
which is the same for delta > 1 + clip_high.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.consumers.learning.objectives.terms import PolicyObjective, number


@dataclass(frozen=True, kw_only=True)
class ClippedObjective(PolicyObjective):
    """An objective with PPO's clip."""

    clip_low: float = number(0.2, above=0, at_most=1)
    clip_high: float = number(0.2, above=0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = number(3.0, above=1, or_none=True)
    """Largest factor a negative advantage is multiplied with, verl's; None for no such bound."""

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the gain of each token and the number of clipped ones.

        Args:
            ratio: [M] under gradient. advantages: [M], 0 where masked, so that masked tokens count as not clipped.

        Returns:
            [M]; and the detached counts `policy_clipped_frac`, which is the sum of `policy_clipped_low_frac` (A < 0)
            and `policy_clipped_high_frac` (A > 0); with a dual clip also `policy_dual_clipped_frac`.
        """
        unclipped = ratio * advantages
        gain = torch.minimum(unclipped, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        clipped = (unclipped > gain).detach()
        high = (clipped & (advantages > 0)).sum()
        metrics = {
            "policy_clipped_frac": clipped.sum(),
            "policy_clipped_low_frac": clipped.sum() - high,
            "policy_clipped_high_frac": high,
        }
        if self.dual_clip is not None:
            floor = self.dual_clip * advantages
            beyond = (advantages < 0) & (gain < floor)
            metrics["policy_dual_clipped_frac"] = beyond.sum()
            gain = torch.where(beyond, floor, gain)
        return gain, metrics
