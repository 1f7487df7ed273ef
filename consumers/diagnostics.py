"""How far the sampling policies were from the trainer's, over one batch of tokens."""

import torch
from torch import Tensor

from consumers.importance import LOG_RATIO_BOUND, log_ratio

K3_BOUND = 10.0
"""Bound of a token's k3 estimate, as in ms-swift; verl has none."""


def diagnose(
    proximal_logprobs: Tensor, behavior_logprobs: Tensor, weights: Tensor, loss_mask: Tensor, threshold: float
) -> dict[str, float]:
    """Divergences and effective sample size over the valid tokens; all 0 (ess 1) without a valid token.

    With l = proximal - behavior, c = l clamped to +-20, rho = exp(c), <.> the mean over valid tokens:

    kl: <-l>. k3_kl: <min(e^c - c - 1, 10)>. chi2: <e^2c> - 1.
    ess_fraction: (sum rho)^2 / (N sum rho^2), from ratios before truncation.
    clipped_frac: share of tokens with rho above `threshold`, whether the mode acts on them or not.
    weight_mean, applied_ess_fraction: of the weights that were applied.

    Args:
        proximal_logprobs, behavior_logprobs, weights: [M]; weights as `correct` returned them.
        loss_mask: [M] bool, before the correction's own mask.
    """
    count = loss_mask.sum()
    valid = torch.where(count > 0, count, 1).double()
    ratio_log = log_ratio(proximal_logprobs, behavior_logprobs, loss_mask).double()
    clamped = ratio_log.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    zero = ratio_log.new_zeros(())
    rho = torch.where(loss_mask, clamped.exp(), zero)
    applied = torch.where(loss_mask, weights.double(), zero)
    # Masked tokens have l = 0 and add nothing to kl and k3_kl.
    values = torch.stack(
        [
            -ratio_log.sum() / valid,
            (clamped.exp() - clamped - 1).clamp(max=K3_BOUND).sum() / valid,
            (rho.square() - loss_mask.double()).sum() / valid,
            _ess_fraction(rho, valid),
            (rho > threshold).sum() / valid,
            applied.sum() / valid,
            _ess_fraction(applied, valid),
        ]
    )
    names = ("kl", "k3_kl", "chi2", "ess_fraction", "clipped_frac", "weight_mean", "applied_ess_fraction")
    return dict(zip(names, values.tolist(), strict=True))


def _ess_fraction(weights: Tensor, count: Tensor) -> Tensor:
    squares = weights.square().sum()
    return torch.where(squares > 0, weights.sum().square() / (count * squares), 1.0)
