"""VCPO's step: its learning rate follows the effective sample size of the rows' importance weights.

Formula, over the N rows i of an optimizer step with an unmasked token, e = the objective's `full_rate_ess`::

    w_i  = exp of the sum over i's unmasked tokens of (current - behavior), clamped to +-20
    ESS  = (sum_i w_i)^2 / sum_i w_i^2 / N
    rate = that of the schedule * sqrt(min(1, ESS / e))

If a few old rows outweigh all others, the gradient is theirs alone and as noisy as one of that many rows: the step is
that of the smaller batch, whose learning rate is lower by the square root under Adam. The weights are those before any
truncation, and before the correction's own mask: this judges the batch, not what is made of it.

Source: VCPO (arXiv 2602.17616), read in the authors' repository, mit-han-lab/vcpo, whose README and `ess_scaling` state
it (e is `base_ess_ratio`, 1 in its run files); not verified against the paper itself. Its other half, the baseline of
least variance, is `minimum_variance` of advantages.py.

Departures: a row is one token sequence, so that a rollout of several segments counts as several; groups without
advantages are not trained on and do not count, where the authors' count every rollout of the batch.
"""

import math

import torch
from torch import Tensor

from penstock.consumers.learning.loss.rows import Rows, clamped


@torch.no_grad()
def weight_sums(current_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, row_ids: Tensor) -> Tensor:
    """Returns [3] float64 on the tokens' device: sum of w, sum of w^2, N. All are [M], row_ids ascending."""
    rows = Rows(row_ids, loss_mask)
    first = torch.cat([row_ids.new_ones(1, dtype=torch.bool), row_ids.diff() != 0]) & (rows.count > 0)
    weights = clamped(rows.sum(current_logprobs.double() - behavior_logprobs.double())).exp()
    return torch.stack([torch.where(first, term, 0.0).sum() for term in (weights, weights.square(), first.double())])


def rate_factor(sums: Tensor, full_rate_ess: float) -> float:
    """Returns what the learning rate is multiplied by, 0 to 1. sums: `weight_sums` of all micro-batches and ranks."""
    total, squares, num_rows = sums.tolist()
    return math.sqrt(min(1.0, total**2 / squares / num_rows / full_rate_ess))
