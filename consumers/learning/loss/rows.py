"""Log-ratios of two policies, and statistics of them by row."""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +- this before exp, which is then always finite."""


def log_ratio(proximal_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns proximal - behavior, 0 where masked, in float32 or float64, detached; unclamped."""
    difference = _wide(proximal_logprobs.detach()) - _wide(behavior_logprobs.detach())
    return torch.where(loss_mask, difference, difference.new_zeros(()))


def clamped(log_ratios: Tensor) -> Tensor:
    """Returns c(l), the log-ratio clamped to +-LOG_RATIO_BOUND; NaN stays NaN."""
    return log_ratios.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def row_numbers(row_ids: Tensor) -> Tensor:
    """Returns [M] int64, each token's row counted from 0 without gaps. row_ids: [M] int64, ascending."""
    return torch.cat([row_ids[:1] * 0, (row_ids.diff() != 0).long()]).cumsum(0)


class Rows:
    """Reductions over the unmasked tokens of each row; results are [M] float64, each token holding its row's value.

    Tokens are added in order, in float64, without atomic operations: equal input gives equal bits on CUDA too. Nothing
    waits for a device: the number of rows is never read.

    Args:
        row_ids: [M] int64, ascending.
        loss_mask: [M] bool.
    """

    def __init__(self, row_ids: Tensor, loss_mask: Tensor) -> None:
        self._row = row_numbers(row_ids)
        # As many rows as possible; the last ones are empty. Integers add up exactly in any order.
        self._lengths = torch.zeros_like(row_ids).scatter_add_(0, self._row, torch.ones_like(row_ids))
        self._mask = loss_mask
        self.count = self._reduced(loss_mask.double(), "sum")
        """[M], the row's number of unmasked tokens."""

    def sum(self, values: Tensor) -> Tensor:
        return self._reduced(torch.where(self._mask, values.double(), 0.0), "sum")

    def mean(self, values: Tensor) -> Tensor:
        """Returns the row's mean; 0 without an unmasked token."""
        return self.sum(values) / self.count.clamp(min=1.0)

    def max(self, values: Tensor) -> Tensor:
        """Returns the row's maximum; -inf without an unmasked token."""
        return self._reduced(torch.where(self._mask, values.double(), float("-inf")), "max")

    def _reduced(self, values: Tensor, reduction: str) -> Tensor:
        if not values.numel():
            return values
        # Without `unsafe` the lengths are checked on the host.
        return torch.segment_reduce(values, reduction, lengths=self._lengths, unsafe=True)[self._row]


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
