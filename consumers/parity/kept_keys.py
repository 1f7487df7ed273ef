"""Attention of rows that go on with keys and values that older weights computed."""

import torch
import torch.nn.functional as F
from torch import Tensor


class KeptKeys:
    """The keys and values of R rows of at most T tokens, by layer, as the engine keeps them across weight updates.

    `begin` names the tokens of the forward pass that follows: N tokens, each of one of the rows.
    """

    def __init__(self, num_rows: int, longest: int) -> None:
        self._shape = (num_rows, longest)
        self._store: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, rows: Tensor, positions: Tensor) -> None:
        """rows, positions: [N] int64, row after row; positions ascend and go on where the row's last pass ended."""
        self._rows, self._positions = rows, positions
        self._active, lengths = rows.unique_consecutive(return_counts=True)
        starts = lengths.cumsum(0) - lengths
        self._line = torch.arange(len(self._active), device=rows.device).repeat_interleave(lengths)
        self._column = torch.arange(len(rows), device=rows.device) - starts.repeat_interleave(lengths)
        self._rectangle = (len(self._active), int(lengths.max()))
        self._end = int(positions.max()) + 1

    def attend(
        self, layer: int, flat: list[Tensor], head_dim: int, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """See `penstock.consumers.learning.attention.OwnAttention`. Keys and values of the pass join the kept ones."""
        query, key, value = flat
        if layer not in self._store:
            self._store[layer] = (
                key.new_zeros(*self._shape, key.shape[1]),
                value.new_zeros(*self._shape, value.shape[1]),
            )
        kept = self._store[layer]
        for store, new in zip(kept, (key, value), strict=True):
            store[self._rows, self._positions] = new
        queries = query.new_zeros(*self._rectangle, query.shape[1])
        queries[self._line, self._column] = query
        places = self._positions.new_zeros(self._rectangle)
        places[self._line, self._column] = self._positions
        columns = torch.arange(self._end, device=places.device)
        # A padded query has place 0 and sees one token, so that its softmax is one of something.
        seen = columns <= places[:, :, None]
        if sliding_window is not None:
            seen &= columns > places[:, :, None] - sliding_window
        q, k, v = (
            states.unflatten(-1, (-1, head_dim)).transpose(1, 2)
            for states in (queries, *(store[self._active, : self._end] for store in kept))
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen[:, None], scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        return attended.transpose(1, 2).flatten(2)[self._line, self._column]
