"""The gap between engine and trainer, by group, in rows recomputed under the policy that sampled them: no drift."""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.consumers.learning.loss.diagnostics import bounded_k3, lag_buckets
from penstock.consumers.learning.loss.rows import row_numbers


class RowGap(NamedTuple):
    """Sums over the tokens of some rows, with l = trainer - engine logprob of a token: of |l| in nats, and of
    k3 = e^l - l - 1, a token's bounded at `diagnostics.K3_BOUND`."""

    num_rows: int = 0
    num_tokens: int = 0
    abs_sum: float = 0.0
    k3_sum: float = 0.0

    @classmethod
    def of(cls, trainer: Tensor, engine: Tensor, num_rows: int) -> "RowGap":
        """Returns the gap of rows whose tokens have these logprobs, [M]."""
        return cls(num_rows, len(trainer), *_sums(trainer.double() - engine.double()).sum(0).tolist())

    def plus(self, other: "RowGap") -> "RowGap":
        return RowGap._make(own + others for own, others in zip(self, other, strict=True))

    @property
    def mean(self) -> float:
        """Mean of |l|; 0 without tokens."""
        return self.abs_sum / max(1, self.num_tokens)

    @property
    def k3(self) -> float:
        """Mean of k3; 0 without tokens."""
        return self.k3_sum / max(1, self.num_tokens)


@torch.no_grad()
def fresh_sums(
    trainer: Tensor,
    engine: Tensor,
    loss_mask: Tensor,
    row_ids: Tensor,
    lag: Tensor,
    group: Tensor,
    num_groups: int,
) -> Tensor:
    """Returns [num_groups, 4] float64, the `RowGap` of each group's rows in which every token has lag 0.

    All but the last are [M]: logprobs, the loss mask, ascending rows, lags, and the place of each token's group, below
    `num_groups`. Waits for no device.
    """
    row = row_numbers(row_ids)
    starts = row.diff(prepend=row.new_full((1,), -1)) > 0
    fresh = loss_mask & (lag_buckets(lag, row) == 0)
    difference = torch.where(fresh, trainer.double() - engine.double(), 0.0)
    columns = torch.cat([torch.stack([(fresh & starts).double(), fresh.double()], dim=1), _sums(difference)], dim=1)
    sums = torch.zeros(num_groups, len(RowGap._fields), dtype=torch.float64, device=trainer.device)
    return sums.index_add_(0, group, columns)


def gaps_of(sums: Tensor) -> list[RowGap]:
    """Returns the gap of each group from [G, 4] sums."""
    return [RowGap(int(rows), int(tokens), *rest) for rows, tokens, *rest in sums.tolist()]


def _sums(difference: Tensor) -> Tensor:
    """Returns [M, 2], |l| and k3 of each l, [M] float64."""
    return torch.stack([difference.abs(), bounded_k3(difference)], dim=1)
