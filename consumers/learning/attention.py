"""Attention over packed rows: one sequence without padding outside, causal rows that never see each other inside."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION = "penstock_packed"
"""The name under which models find `packed_attention`: `attn_implementation=IMPLEMENTATION`."""

MIN_BUCKET_TOKENS = 4096
"""Rows of different lengths are padded to one rectangle up to this size: below it another kernel call costs more."""
_MAX_PADDING = 0.25
"""In larger buckets, a row shorter than the bucket's longest by more than this share starts a bucket of its own."""


@dataclass(frozen=True)
class PackedLayout:
    """The places of each row's tokens among the N packed tokens.

    Packed tokens are each row's own and, once for all rows that begin with it, a shared prefix. A bucket is a rectangle
    [rows, longest row] of packed indices; past a row's end it repeats the row's first token, which nothing reads. The
    unpadded form consists of spans, consecutive in the packed tokens: prefixes, and rows without their prefixes. A
    span's keys are those of its prefix, if it has one, and its own; S over all spans.

    buckets: int64 tensors, packed indices, each [B_i, T_i].
    slots: [N] int64, a place of each packed token in the flattened, concatenated buckets.
    key_tokens: [S] int64, packed indices, span after span.
    query_bounds, key_bounds: [spans + 1] int32, where spans begin and end in the packed tokens and in `key_tokens`.
    longest_query, longest_keys: the most tokens and the most keys of a span.
    """

    buckets: tuple[Tensor, ...]
    slots: Tensor
    key_tokens: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_keys: int

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "PackedLayout":
        names = ("slots", "key_tokens", "query_bounds", "key_bounds")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        return replace(self, buckets=tuple(b.to(device, non_blocking=non_blocking) for b in self.buckets), **moved)


class OwnAttention(Protocol):
    """A layout that computes its own attention, for rows that do not start at their first token."""

    def attend(
        self, layer: int, flat: list[Tensor], head_dim: int, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """Returns [N, num_heads * head_dim]. flat: query, key and value, [N, heads * head_dim] each."""


def make_layout(
    prefix_starts: np.ndarray,
    prefix_lengths: np.ndarray,
    own_starts: np.ndarray,
    lengths: np.ndarray,
    num_packed: int,
    min_bucket_tokens: int = MIN_BUCKET_TOKENS,
) -> PackedLayout:
    """Returns the layout of rows, longest first.

    Row r is `prefix_lengths[r]` packed tokens from `prefix_starts[r]`, then `lengths[r] - prefix_lengths[r]` from
    `own_starts[r]`. All arguments int64 [R]; `lengths` descends.
    """
    slots = np.empty(num_packed, dtype=np.int64)
    buckets, used = [], 0
    for first, last in _bucket_bounds(lengths, min_bucket_tokens):
        rows = slice(first, last)
        columns = np.arange(lengths[first])[None]
        prefix, own = prefix_lengths[rows, None], own_starts[rows, None]
        indices = np.where(columns < prefix, prefix_starts[rows, None] + columns, own + columns - prefix)
        real = columns < lengths[rows, None]
        indices = np.where(real, indices, indices[:, :1])
        # A shared token is in several rows; its outputs there are equal, and the last place wins.
        slots[indices[real]] = used + np.flatnonzero(real)
        buckets.append(torch.from_numpy(indices))
        used += indices.size
    spans = _spans(prefix_starts, prefix_lengths, own_starts, lengths)
    num_queries, num_keys = np.array([(stop - start, len(keys)) for start, stop, keys in spans]).T
    return PackedLayout(
        buckets=tuple(buckets),
        slots=torch.from_numpy(slots),
        key_tokens=torch.from_numpy(np.concatenate([keys for _, _, keys in spans])),
        query_bounds=_bounds(num_queries),
        key_bounds=_bounds(num_keys),
        longest_query=int(num_queries.max()),
        longest_keys=int(num_keys.max()),
    )


def _spans(
    prefix_starts: np.ndarray, prefix_lengths: np.ndarray, own_starts: np.ndarray, lengths: np.ndarray
) -> list[tuple[int, int, np.ndarray]]:
    """Returns where each span starts and stops among the packed tokens, and its keys; in order of position."""
    found = {}
    for prefix_start, prefix_length, own_start, length in zip(
        prefix_starts.tolist(), prefix_lengths.tolist(), own_starts.tolist(), lengths.tolist(), strict=True
    ):
        prefix = np.arange(prefix_start, prefix_start + prefix_length)
        stop = own_start + length - prefix_length
        if prefix_length:
            found[prefix_start] = prefix_start, prefix_start + prefix_length, prefix
        if stop > own_start:
            found[own_start] = own_start, stop, np.concatenate([prefix, np.arange(own_start, stop)])
    return [found[start] for start in sorted(found)]


def _bounds(sizes: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))


def _bucket_bounds(lengths: np.ndarray, min_bucket_tokens: int) -> list[tuple[int, int]]:
    bounds, first = [], 0
    for row, length in enumerate(lengths):
        longest = lengths[first]
        if (row - first) * longest >= min_bucket_tokens and length < longest * (1 - _MAX_PADDING):
            bounds.append((first, row))
            first = row
    bounds.append((first, len(lengths)))
    return bounds


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: PackedLayout | OwnAttention | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Computes attention over packed rows; transformers' attention interface.

    Dropout is never applied: the trainer must reproduce the policy that sampled. It is never compiled: each number of
    buckets and rows would need another compilation.

    Args:
        query: [1, num_heads, N, head_dim]; key and value: [1, num_key_value_heads, N, head_dim].
        layout: passed through the model's keyword arguments.

    Returns:
        ([1, N, num_heads, head_dim], None)

    Raises:
        NotImplementedError: logit soft-capping, attention sinks, values of another width than the queries, or a model
            that does not pass its keyword arguments on.
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("logit soft-capping and attention sinks are not supported")
    if value.shape[3] != query.shape[3]:
        raise NotImplementedError(f"values of width {value.shape[3]} with queries of width {query.shape[3]} (MLA)")
    if layout is None:
        raise NotImplementedError("it does not pass the layout of the rows to its attention")
    flat = [states[0].transpose(0, 1).flatten(1) for states in (query, key, value)]
    if not isinstance(layout, PackedLayout):
        layer: Any = module.layer_idx
        packed = layout.attend(layer, flat, query.shape[3], scaling, sliding_window)
    elif query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        packed = _unpadded(flat, layout, query.shape[3], scaling, sliding_window)
    else:
        packed = _in_rectangles(flat, layout, query.shape[3], scaling, sliding_window)
    return packed.view(1, -1, query.shape[1], value.shape[3]), None


def _in_rectangles(
    flat: list[Tensor], layout: PackedLayout, head_dim: int, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Computes scaled dot-product attention over padded buckets. flat: query, key, value [N, heads * head_dim]."""
    outputs = []
    for indices in layout.buckets:
        longest = indices.shape[1]
        q, k, v = (_rows(indices, states, head_dim).transpose(1, 2) for states in flat)
        if _wants_whole_heads(q) and k.shape[1] != q.shape[1]:
            k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
        band = None
        if sliding_window is not None and longest > sliding_window:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=q.device)
            band = ones.tril() & ~ones.tril(-sliding_window)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    return F.embedding(layout.slots, outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def _unpadded(
    flat: list[Tensor], layout: PackedLayout, head_dim: int, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Computes flash attention over the spans, which exists for 16-bit floats on CUDA only. Queries and results stay in
    place; keys and values are gathered.

    The last query of a span sees all of its keys, each earlier one a key less: with fewer queries than keys the kernel
    aligns its causal mask to the end (FlashAttention 2.1, "Change behavior of causal flag").
    """
    q = flat[0].unflatten(-1, (-1, head_dim))
    k, v = (_rows(layout.key_tokens, states, head_dim) for states in flat[1:])
    grouped: Any = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_enable_gqa(varlen_attn) else {}
    attended: Any = varlen_attn(
        q, k, v, layout.query_bounds, layout.key_bounds, layout.longest_query, layout.longest_keys, scale=scaling,
        # A token sees itself and this many before it; -1 means all.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **grouped,
    )  # fmt: skip
    packed: Tensor = attended.flatten(1)
    return packed


def _wants_whole_heads(query: Tensor) -> bool:
    """Returns whether each head needs keys and values of its own: on CUDA only the kernel whose memory grows with the
    square of the length takes grouped queries of 32 bits."""
    return query.is_cuda


@cache
def _takes_enable_gqa(attend: Callable[..., Any]) -> bool:
    """Returns whether the kernel has the argument; torch 2.11's takes grouped queries without it."""
    return "enable_gqa" in signature(attend).parameters


def _rows(indices: Tensor, states: Tensor, head_dim: int) -> Tensor:
    """Gathers [*indices, heads, head_dim]. Uses an embedding lookup, whose backward adds rows in a fixed order and is
    far faster than index_add on CPU."""
    return F.embedding(indices, states).unflatten(-1, (-1, head_dim))


# No mask function is registered: without one transformers builds no mask.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
