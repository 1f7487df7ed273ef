"""Collectives through which gradients pass: rows that go to other ranks and come back."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from penstock.consumers.learning.batch.layout import TokenShare


def to_owners(states: Tensor, share: TokenShare, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the states [N, H] of a rank's own micro-batch; each rank has those of its share, [L, H]. group: None for
    a rank alone."""
    arrived = exchanged(F.embedding(share.order, states), share.sent, share.received, group)
    return F.embedding(share.places, arrived)


def to_sharers(states: Tensor, share: TokenShare, group: dist.ProcessGroup | None) -> Tensor:
    """Does the reverse of `to_owners`."""
    arrived = exchanged(F.embedding(share.places.argsort(), states), share.received, share.sent, group)
    return F.embedding(share.order.argsort(), arrived)


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Sends rows [sum(sent), H] to the ranks, consecutive ones to each; returns what they send, [sum(received), H]."""
    found: Tensor = rows if group is None else _Exchange.apply(rows, sent, received, group)
    return found


def all_rows(rows: Tensor, longest: int, group: dist.ProcessGroup) -> Tensor:
    """Returns the rows of every rank, each rank's [at most `longest`, H] padded to it: [ranks * longest, H]."""
    found: Tensor = _AllRows.apply(rows, longest, group)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.back = received, sent, group
        into = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(into, rows.contiguous(), list(received), list(sent), group=group)
        return into

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradient, *ctx.back), None, None, None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, longest: int, group: Any) -> Tensor:
        ctx.group, ctx.shape, ctx.dtype = group, (longest, rows.shape[1]), rows.dtype
        ctx.num_rows = len(rows)
        padded = rows.new_zeros(ctx.shape)
        padded[: len(rows)] = rows
        into = rows.new_empty(group.size() * longest, rows.shape[1])
        dist.all_gather_into_tensor(into, padded, group=group)
        return into

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Summed in float32, as parameters' gradients are.
        own = torch.empty(ctx.shape, dtype=torch.float32, device=gradient.device)
        dist.reduce_scatter_tensor(own, gradient.float().contiguous(), group=ctx.group)
        return own[: ctx.num_rows].to(ctx.dtype), None, None
