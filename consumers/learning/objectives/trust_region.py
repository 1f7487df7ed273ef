"""The gain of a ratio to the sampler, without tokens that an update would move further out of a trust region.

Formula, with r = exp(current - behavior), the advantage A and a divergence D of the file that calls::

    gain = r * A, but 0, without gradient,  where A > 0, r > 1 and D > high,  or A < 0, r < 1 and D > low

A token beyond the bound that its advantage draws back keeps its gain, and no gain is clipped. Source: DPPO (arXiv
2602.04879, eq. 11 and 12).
"""

import torch
from torch import Tensor

from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.terms import bounded_exp


def trusted_gain(
    inputs: LossInputs, divergence: Tensor, *, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the gain of each token and the number of masked ones.

    Args:
        divergence: [M], detached. A NaN masks nothing, so that it reaches the loss.

    Returns:
        [M] under gradient; and the detached counts `policy_clipped_frac`, which is the sum of `policy_clipped_low_frac`
        (A < 0) and `policy_clipped_high_frac` (A > 0).
    """
    log_ratio = inputs.current_logprobs - inputs.behavior_logprobs
    falls = (inputs.advantages < 0) & (log_ratio < 0) & (divergence > low)
    rises = (inputs.advantages > 0) & (log_ratio > 0) & (divergence > high)
    gain = torch.where(falls | rises, 0.0, bounded_exp(log_ratio) * inputs.advantages)
    metrics = {
        "policy_clipped_frac": falls.sum() + rises.sum(),
        "policy_clipped_low_frac": falls.sum(),
        "policy_clipped_high_frac": rises.sum(),
    }
    return gain, metrics
