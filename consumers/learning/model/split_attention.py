"""Layers that mix the tokens of rows, in a pass whose tokens several ranks share.

In a packed pass these are attention: each rank has its queries, and gathers every key and value. In rectangles they are
recurrences and convolutions too: each rank computes them over its own rows, whole.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.consumers.learning.batch.layout import PackedLayout, TokenShare
from penstock.consumers.learning.model.attention import Scores, attend, is_unpadded, rows_of, unpadded
from penstock.consumers.learning.model.exchange import all_rows, to_owners, to_sharers


class SplitAttention:
    """An `OwnAttention` of one rank's share."""

    def __init__(self, share: TokenShare, group: dist.ProcessGroup) -> None:
        self._share, self._group = share, group

    def attend(self, layer: int, flat: list[Tensor], head_dim: int, scores: Scores) -> Tensor:
        """See `OwnAttention`; flat: of this rank's tokens."""
        query, layout = flat[0], self._share.layout
        width = flat[1].shape[1]
        gathered = all_rows(torch.cat(flat[1:], dim=1), self._share.longest, self._group)
        key, value = gathered[:, :width], gathered[:, width:]
        if scores.is_plain and is_unpadded(query.device, query.dtype):
            return unpadded([query, key, value], layout, head_dim, scores)
        outputs, queries, keys = [], layout.query_bounds.tolist(), layout.key_bounds.tolist()
        for n in range(len(queries) - 1):
            own = query[queries[n] : queries[n + 1]].unflatten(-1, (-1, head_dim))
            places = layout.key_tokens[keys[n] : keys[n + 1]]
            seen_key, seen_value = (rows_of(places, states, head_dim) for states in (key, value))
            outputs.append(_piece(own, seen_key, seen_value, scores))
        return torch.cat(outputs)


def _piece(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Returns [Q, num_heads * head_dim]: the last query sees every key, each earlier one a key less. query: [Q, heads,
    head_dim]; key, value: [K, heads, head_dim]."""
    q, k, v = (states[None].transpose(1, 2) for states in (query, key, value))
    return attend(q, k, v, None, scores)[0].transpose(0, 1).flatten(1)


class WholeRows:
    """Gives the layers that mix a row's tokens the rank's own rows, a rectangle [B, T, hidden], and all else in the
    blocks its share of the tokens, [1, L, hidden].

    A layer in a block mixes tokens if it is called with more than the hidden states: positions, a mask, a cache. The
    body runs on the rectangle's token ids, so that these are the rectangle's.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.current: tuple[TokenShare, PackedLayout, dist.ProcessGroup | None] | None = None
        """The share and the own rows' layout of a pass that ranks share. It stays until the next one: a layer may be
        computed again for its gradient."""
        for first in blocks[:1]:
            first.register_forward_pre_hook(lambda _, *given: self._given(given, self._shared), with_kwargs=True)
        for layer in chain.from_iterable(block.children() for block in blocks):
            layer.register_forward_pre_hook(lambda _, *given: self._given(given, self._whole), with_kwargs=True)
            layer.register_forward_hook(self._after, with_kwargs=True)

    def _given(self, given: Sequence[Any], change: Callable[[Tensor], Tensor]) -> Any:
        """Changes the hidden states among the arguments of a layer that mixes tokens."""
        args, kwargs = given
        if not self._mixes(args, kwargs):
            return None
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    def _after(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._mixes(args, kwargs):
            return None
        return (self._shared(output[0]), *output[1:]) if isinstance(output, tuple) else self._shared(output)

    def _mixes(self, args: Any, kwargs: Any) -> bool:
        return self.current is not None and len(args) + len(kwargs) > 1

    @torch.compiler.disable
    def _shared(self, states: Tensor) -> Tensor:
        assert self.current is not None
        share, layout, group = self.current
        return to_sharers(F.embedding(layout.slots, states.flatten(0, 1)), share, group)[None]

    @torch.compiler.disable
    def _whole(self, states: Tensor) -> Tensor:
        assert self.current is not None
        share, layout, group = self.current
        return F.embedding(layout.buckets[0], to_owners(states[0], share, group))
