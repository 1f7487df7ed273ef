"""Computes correction and diagnostics for padded batches, [B, T], the layout of the golden files and the oracles."""

import torch
from torch import Tensor

from penstock.consumers.learning.loss.diagnostics import MismatchSums
from penstock.consumers.learning.loss.importance import Correction, correct_packed
from penstock.schemas.config import CorrectionConfig


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
    """Calls `correct_packed` for padded rows: every tensor is [B, T]."""
    shape = proximal_logprobs.shape
    packed = correct_packed(
        proximal_logprobs.flatten(),
        behavior_logprobs.flatten(),
        loss_mask.flatten(),
        lag.flatten(),
        torch.arange(shape[0], device=proximal_logprobs.device).repeat_interleave(shape[1]),
        config,
        advantages=None if advantages is None else advantages.flatten(),
        current_logprobs=None if current_logprobs is None else current_logprobs.flatten(),
    )
    return Correction(packed.weights.view(shape), packed.keep_mask.view(shape), packed.corrected_mask.view(shape))


def mismatch_sums(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    row_ids: Tensor,
    *,
    weights: Tensor | None = None,
    keep_mask: Tensor | None = None,
    corrected_mask: Tensor | None = None,
    lag: Tensor | None = None,
    advantages: Tensor | None = None,
    threshold: float = 2.0,
    **settings,
) -> MismatchSums:
    """Returns `MismatchSums.of_packed` with defaults: weights of 1 (a weight of 0 is not kept), nothing corrected, lags
    and advantages of 0."""
    weights = torch.ones_like(train_logprobs) if weights is None else weights
    correction = Correction(
        weights,
        weights != 0 if keep_mask is None else keep_mask,
        torch.zeros_like(loss_mask) if corrected_mask is None else corrected_mask,
    )
    return MismatchSums.of_packed(
        train_logprobs,
        rollout_logprobs,
        loss_mask,
        row_ids,
        torch.zeros_like(row_ids) if lag is None else lag,
        correction,
        threshold=threshold,
        advantages=torch.zeros_like(train_logprobs) if advantages is None else advantages,
        **settings,
    )


def mismatch_metrics(
    train_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    lag: Tensor | None = None,
    advantages: Tensor | None = None,
    weights: Tensor | None = None,
    corrected_mask: Tensor | None = None,
    **settings,
) -> dict[str, float]:
    """Returns the metrics of `mismatch_sums` for padded rows.

    Args:
        weights, corrected_mask, lag: [B, T]. advantages: [B, T], or [B] or [B, 1] for one per row.
        settings: threshold and level.
    """
    num_rows, length = train_logprobs.shape
    if advantages is not None and advantages.shape in ((num_rows,), (num_rows, 1)):
        advantages = advantages.reshape(num_rows, 1).expand(num_rows, length)
    # When packed, every token is sampled and its lag counts for its row; here a token may be padding.
    lag = None if lag is None else torch.where(loss_mask, lag, torch.zeros_like(lag))
    given = {"weights": weights, "corrected_mask": corrected_mask, "lag": lag, "advantages": advantages}
    return mismatch_sums(
        train_logprobs.flatten(),
        rollout_logprobs.flatten(),
        loss_mask.flatten(),
        torch.arange(num_rows, device=train_logprobs.device).repeat_interleave(length),
        **{name: None if tensor is None else tensor.flatten() for name, tensor in given.items()},
        **settings,
    ).metrics()
