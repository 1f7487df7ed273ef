"""The importance weight of each token: how far its behavior logprob is trusted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from schemas.config import CorrectionConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this range before exp: finite always."""


@dataclass(frozen=True)
class Correction:
    """weights: like the inputs, detached; 0 where `keep_mask` is False.

    keep_mask: bool, the loss mask less what the correction rejects.
    metrics: detached scalar sums over the loss mask: `num_corrected`, the tokens truncated or rejected.
    """

    weights: Tensor
    keep_mask: Tensor
    metrics: dict[str, Tensor]


def log_ratio(proximal_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """proximal - behavior, 0 where masked, in float32 or better, detached; unclamped."""
    difference = _wide(proximal_logprobs.detach()) - _wide(behavior_logprobs.detach())
    return torch.where(loss_mask, difference, difference.new_zeros(()))


def correct(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    lag: Tensor,
    config: CorrectionConfig,
    *,
    advantages: Tensor | None = None,
    current_logprobs: Tensor | None = None,
) -> Correction:
    """Truncates or masks exp(proximal - behavior), token by token.

    With rho the ratio of the clamped logarithms and tau `config.threshold`: `none` gives 1, `token_truncate`
    min(rho, tau), `token_mask` rho where rho <= tau, else 0. These modes trust every lag alike, and read neither
    advantages nor current logprobs.

    Args:
        proximal_logprobs, behavior_logprobs: natural logarithms, [M] or [B, T]; values under the mask are never read.
        loss_mask: bool, same shape.
        lag: integer optimizer steps, same shape.
    """
    shapes = {tuple(t.shape) for t in (proximal_logprobs, behavior_logprobs, loss_mask, lag)}
    if len(shapes) != 1:
        raise ValueError(f"correct: proximal, behavior, loss_mask and lag have shapes {shapes}, expected one shape")
    ratio = torch.exp(
        log_ratio(proximal_logprobs, behavior_logprobs, loss_mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    )
    beyond = loss_mask & (ratio > config.threshold)
    keep = loss_mask
    if config.mode == "token_truncate":
        weights = ratio.clamp(max=config.threshold)
    elif config.mode == "token_mask":
        keep = loss_mask & ~beyond
        weights = ratio
    else:
        weights = torch.ones_like(ratio)
        beyond = torch.zeros_like(beyond)
    weights = torch.where(keep, weights, weights.new_zeros(()))
    return Correction(weights, keep, {"num_corrected": beyond.sum()})


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
