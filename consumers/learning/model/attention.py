"""Attention over packed rows: one sequence without padding outside, causal rows that never see each other inside."""

from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from penstock.consumers.learning.batch.layout import PackedLayout

IMPLEMENTATION = "penstock_packed"
"""The name under which models find `packed_attention`: `attn_implementation=IMPLEMENTATION`."""


_MOST_MASKED = 1 << 22
"""Pairs of a query and a key that a mask for a kernel has at once."""
_MOST_WEIGHTS = 1 << 26
"""Of queries and keys in memory at once, where no kernel computes them: 256 MiB in float32."""


class Scores(NamedTuple):
    """How a layer turns products of queries and keys into weights.

    scaling: their factor. sliding_window: the keys that a query sees, its own among them; None for all. softcap: c in
    c tanh(score / c); None for none. sinks: [num_heads], a score in each query's softmax that has no value.
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """True if kernels compute it."""
        return self.softcap is None and self.sinks is None


class OwnAttention(Protocol):
    """A layout that computes its own attention, for rows that do not start at their first token."""

    def attend(self, layer: int, flat: list[Tensor], head_dim: int, scores: Scores) -> Tensor:
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
        query, key: [1, num_heads or num_key_value_heads, N, head_dim]; value: [1, num_key_value_heads, N, value_dim],
            of another width in latent attention.
        layout: passed through the model's keyword arguments.
        softcap, s_aux: see `Scores`; no kernel takes them, see `_by_blocks`.

    Returns:
        ([1, N, num_heads, value_dim], None)

    Raises:
        NotImplementedError: a model that does not pass its keyword arguments on.
    """
    if layout is None:
        raise NotImplementedError("it does not pass the layout of the rows to its attention")
    scores = Scores(query.shape[3] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    width = max(query.shape[3], value.shape[3])
    flat = [_widened(states[0].transpose(0, 1), width).flatten(1) for states in (query, key, value)]
    if not isinstance(layout, PackedLayout):
        layer: Any = module.layer_idx
        packed = layout.attend(layer, flat, width, scores)
    elif scores.is_plain and layout.blocks is None and is_unpadded(query.device, query.dtype):
        packed = unpadded(flat, layout, width, scores)
    else:
        packed = _in_rectangles(flat, layout, width, scores)
    return packed.view(1, -1, query.shape[1], width)[..., : value.shape[3]], None


def _widened(states: Tensor, width: int) -> Tensor:
    """Appends zeros to `width` columns, which change neither products of queries and keys nor the other columns of the
    values."""
    return states if states.shape[-1] == width else F.pad(states, (0, width - states.shape[-1]))


def is_unpadded(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether attention runs over the spans in place: flash attention, on CUDA and for 16-bit floats only."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _in_rectangles(flat: list[Tensor], layout: PackedLayout, head_dim: int, scores: Scores) -> Tensor:
    """Computes scaled dot-product attention over padded buckets. flat: query, key, value [N, heads * head_dim]."""
    outputs = []
    for indices in layout.buckets:
        longest = indices.shape[1]
        q, k, v = (rows_of(indices, states, head_dim).transpose(1, 2) for states in flat)
        if _wants_whole_heads(q):
            k, v = whole_heads(q, k, v)
        seen = None
        if layout.blocks is not None:
            ones = torch.ones(longest, longest, dtype=torch.bool, device=q.device)
            blocks = layout.blocks[indices]
            seen = ones.tril() | ((blocks[:, :, None] == blocks[:, None]) & (blocks >= 0)[:, None])[:, None]
            if scores.sliding_window is not None:
                seen = seen & ~ones.tril(-scores.sliding_window)
        outputs.append(attend(q, k, v, seen, scores).transpose(1, 2).flatten(2).flatten(0, 1))
    return F.embedding(layout.slots, outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scores: Scores) -> Tensor:
    """Returns scaled dot-product attention, [B, num_heads, T, head_dim], of keys and values [B, heads, S, head_dim].

    seen: bool, broadcast to [B, num_heads, T, S], the keys of each query. None: the queries are the last of S tokens,
        and each sees its own key and those before it, within the sliding window.
    """
    length, num_keys, window = query.shape[2], key.shape[2], scores.sliding_window
    if scores.is_plain and (seen is not None or (length == num_keys and (window is None or num_keys <= window))):
        return _by_kernel(query, key, value, seen, scores)
    if not scores.is_plain:
        key, value = whole_heads(query, key, value)
    return torch.cat(list(_by_blocks(query, key, value, seen, scores)), dim=2)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scores: Scores) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _by_blocks(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scores: Scores) -> Iterator[Tensor]:
    """Yields the attention of consecutive queries. A block's mask and weights are computed again for its gradient,
    unless it is the only one, so that memory grows with the length of a row and not with its square."""
    num_rows, num_heads, length, _ = query.shape
    num_keys, window = key.shape[2], scores.sliding_window
    before = num_keys - length

    def block(own: Tensor, first: int) -> Tensor:
        last = first + own.shape[2]
        if seen is not None:
            keys, visible = slice(0, num_keys), seen[..., first:last, :]
        else:
            keys = slice(0 if window is None else max(0, before + first + 1 - window), before + last)
            behind = torch.arange(before + first, keys.stop, device=own.device)[:, None]
            behind = behind - torch.arange(keys.start, keys.stop, device=own.device)
            visible = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        attended = _by_kernel if scores.is_plain else _weighted
        return attended(own, key[:, :, keys], value[:, :, keys], visible, scores)

    size = max(1, _MOST_MASKED // num_keys if scores.is_plain else _MOST_WEIGHTS // (num_rows * num_heads * num_keys))
    if size >= length:
        yield block(query, 0)
        return
    for first in range(0, length, size):
        own = query[:, :, first : first + size]
        found: Tensor = checkpoint(block, own, first, use_reentrant=False, preserve_rng_state=False)
        yield found


def _weighted(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scores: Scores) -> Tensor:
    """Returns attention by its definition, see `attend`; keys and values have the queries' heads."""
    products = (query @ key.transpose(2, 3)).float() * scores.scaling
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~seen, -torch.inf)
    normalizer = products.logsumexp(3, keepdim=True)
    if scores.sinks is not None:
        normalizer = torch.logaddexp(normalizer, scores.sinks.float()[:, None, None])
    return (products - normalizer).exp().to(value.dtype) @ value


def whole_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values of every head of the queries; each is [B, heads, tokens, head_dim]."""
    if key.shape[1] == query.shape[1]:
        return key, value
    repeated = [states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value)]
    return repeated[0], repeated[1]


def unpadded(flat: list[Tensor], layout: PackedLayout, head_dim: int, scores: Scores) -> Tensor:
    """Computes flash attention over the spans, which exists for 16-bit floats on CUDA only. Queries and results stay in
    place; keys and values are gathered.

    The last query of a span sees all of its keys, each earlier one a key less: with fewer queries than keys the kernel
    aligns its causal mask to the end (FlashAttention 2.1, "Change behavior of causal flag").
    """
    q = flat[0].unflatten(-1, (-1, head_dim))
    k, v = (rows_of(layout.key_tokens, states, head_dim) for states in flat[1:])
    grouped: Any = {"enable_gqa": True} if q.shape[1] != k.shape[1] and _takes_enable_gqa(varlen_attn) else {}
    attended: Any = varlen_attn(
        q, k, v, layout.query_bounds, layout.key_bounds, layout.longest_query, layout.longest_keys,
        scale=scores.scaling,
        # A token sees itself and this many before it; -1 means all.
        window_size=(-1 if scores.sliding_window is None else scores.sliding_window - 1, 0),
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


def rows_of(indices: Tensor, states: Tensor, head_dim: int) -> Tensor:
    """Gathers [*indices, heads, head_dim]. Uses an embedding lookup, whose backward adds rows in a fixed order and is
    far faster than index_add on CPU."""
    return F.embedding(indices, states).unflatten(-1, (-1, head_dim))


# No mask function is registered: without one transformers builds no mask.
ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
