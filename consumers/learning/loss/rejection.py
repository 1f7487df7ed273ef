"""Masks in addition to the importance weight: tokens and rows that are too far off-policy to be trained on.

Each mask keeps a NaN: a value that cannot be judged reaches the loss, and the step is skipped and counted.
"""

import torch
from torch import Tensor

from penstock.consumers.learning.loss.rows import Rows, clamped
from penstock.schemas.config import Rejection


def rejected(log_ratios: Tensor, rows: Rows, rejection: Rejection) -> Tensor:
    """Returns [M] bool: True where the rejection masks a token.

    verl's rollout rejection (rollout_rs), with l = proximal - behavior, c its clamped value, and Schulman's estimators
    of a KL divergence ("Approximating KL Divergence", 2020) k1 = -c, k2 = c^2 / 2, k3 = e^c - c - 1. A token is judged
    by its own value, or by its row's sum, mean or maximum. `upper` bounds k2 and k3 themselves; for k1 the exponential
    has to lie in [lower, upper], where `lower` None means 1 / upper, or no bound for seq_max_k1.

    Args:
        log_ratios: [M] float64, unclamped, 0 where masked.

    Returns:
        [M] bool; False in a row without an unmasked token, unless its every token is masked anyway.
    """
    scope, _, estimator = rejection.mode.rpartition("_")
    if estimator == "k1":
        # A sum of clamped terms would hide a far token behind many near ones of the other sign: the sum is clamped.
        values = torch.exp(clamped(_over(scope, -log_ratios, rows)))
        if rejection.lower is not None:
            lower = rejection.lower
        else:
            lower = 0.0 if rejection.mode == "seq_max_k1" else 1.0 / rejection.upper
        return (values > rejection.upper) | (values < lower)
    bounded = clamped(log_ratios)
    values = bounded.square() / 2 if estimator == "k2" else torch.expm1(bounded) - bounded
    return _over(scope, values, rows) > rejection.upper


def off_policy_rows_kept(
    behavior_logprobs: Tensor,
    current_logprobs: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    row_ids: Tensor,
    delta: float,
) -> Tensor:
    """Off-policy sequence masking: False for rows that drifted and whose probability would be lowered further.

    With D the mean of behavior - current over the row's unmasked tokens, a row is dropped if D > delta and the
    advantage is negative, both strictly. Source: DeepSeek-V3.2 (arXiv 2512.02556, "Off-Policy Sequence Masking");
    ms-swift, TRL and slime agree.

    Args:
        behavior_logprobs, current_logprobs, advantages: [M] float; values under the mask are never read.
        loss_mask: [M] bool.
        row_ids: [M] int64, ascending.

    Returns:
        [M] bool, detached; False under the mask.
    """
    drift = Rows(row_ids, loss_mask).mean(behavior_logprobs.detach().double() - current_logprobs.detach().double())
    return loss_mask & ~((drift > delta) & (advantages.detach() < 0))


def _over(scope: str, values: Tensor, rows: Rows) -> Tensor:
    if scope == "token":
        return values
    return {"seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.max}[scope](values)
