"""Attention over packed rows: one sequence without padding outside, causal rows that never see each other inside."""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.consumers.learning.batch.layout import PackedLayout

IMPLEMENTATION = "penstock_packed"
"""The name under which models find `packed_attention`: `attn_implementation=IMPLEMENTATION`."""


class OwnAttention(Protocol):
    """A layout that computes its own attention, for rows that do not start at their first token."""

    def attend(
        self, layer: int, flat: list[Tensor], head_dim: int, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """Returns [N, num_heads * head_dim]. flat: query, key and value, [N, heads * head_dim] each."""


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
    elif is_unpadded(query.device, query.dtype):
        packed = _unpadded(flat, layout, query.shape[3], scaling, sliding_window)
    else:
        packed = _in_rectangles(flat, layout, query.shape[3], scaling, sliding_window)
    return packed.view(1, -1, query.shape[1], value.shape[3]), None


def is_unpadded(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether attention runs over the spans in place: flash attention, on CUDA and for 16-bit floats only."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


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
