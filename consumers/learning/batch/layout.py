"""Where each row's tokens are among the packed ones."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Arrangement = Literal["packed", "whole", "rectangles"]
"""How the rows of a pass are arranged: one after another, a prompt that siblings share once; one after another, each
with its own prompt; padded to one rectangle."""
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
    blocks: [N] int64, the image whose tokens see each other in both directions, -1 for none; None if no tokens do.
    """

    buckets: tuple[Tensor, ...]
    slots: Tensor
    key_tokens: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_keys: int
    blocks: Tensor | None = None

    @property
    def num_padding(self) -> int:
        """Tokens of the buckets past their row's end."""
        return sum(int((bucket[:, 1:] == bucket[:, :1]).sum()) for bucket in self.buckets)

    @property
    def boundaries(self) -> dict[str, Tensor | int]:
        """Where whole rows begin, as transformers' layers and their kernels take it (`FlashAttentionKwargs`)."""
        bounds, longest = self.query_bounds, self.longest_query
        rows = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
        return {
            "seq_idx": rows.repeat_interleave(bounds.diff(), output_size=len(self.slots))[None],
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "PackedLayout":
        names = ("slots", "key_tokens", "query_bounds", "key_bounds")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        return replace(self, buckets=tuple(b.to(device, non_blocking=non_blocking) for b in self.buckets), **moved)


@dataclass(frozen=True)
class TokenShare:
    """This rank's L of the T tokens of the micro-batches of several ranks, which they compute together.

    Of 2R consecutive parts of the tokens rank r has the parts r and 2R - 1 - r, so that the ranks' causal attention
    costs about the same (Llama 3, arXiv 2407.21783, section 3.3.2).

    token_ids, position_ids: [L] int64.
    routes: [L, layers, experts per token] int16, or None; see `MicroBatch`.
    layout: of queries [L] and keys: `key_tokens` are places among all ranks' tokens, each rank's padded to `longest`
        and one after another. It has no buckets.
    longest: the most tokens of a rank.
    order: [L] int64, the own tokens by the rank whose micro-batch has them, `sent` of each rank.
    places: [N] int64, where the packed tokens of the rank's own micro-batch are among those received, `received` of
        each rank.
    """

    token_ids: Tensor
    position_ids: Tensor
    routes: Tensor | None
    layout: PackedLayout
    longest: int
    order: Tensor
    sent: tuple[int, ...]
    places: Tensor
    received: tuple[int, ...]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "TokenShare":
        names = ("token_ids", "position_ids", "layout", "order", "places")
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in names}
        routes = None if self.routes is None else self.routes.to(device, non_blocking=non_blocking)
        return replace(self, routes=routes, **moved)


def make_layout(
    prefix_starts: np.ndarray,
    prefix_lengths: np.ndarray,
    own_starts: np.ndarray,
    lengths: np.ndarray,
    num_packed: int,
    min_bucket_tokens: float = MIN_BUCKET_TOKENS,
) -> PackedLayout:
    """Returns the layout of rows, longest first. min_bucket_tokens: infinite for one bucket of all rows.

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


def _bucket_bounds(lengths: np.ndarray, min_bucket_tokens: float) -> list[tuple[int, int]]:
    bounds, first = [], 0
    for row, length in enumerate(lengths):
        longest = lengths[first]
        if (row - first) * longest >= min_bucket_tokens and length < longest * (1 - _MAX_PADDING):
            bounds.append((first, row))
            first = row
    bounds.append((first, len(lengths)))
    return bounds
