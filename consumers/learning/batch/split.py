"""Rows whose tokens several ranks share: what each rank computes in a forward pass, and to whom it goes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.batch.batch import UNKNOWN_EXPERT, MicroBatch, idle_microbatch
from penstock.consumers.learning.batch.layout import PackedLayout, TokenShare


def split_tokens(microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns the micro-batches of ranks that compute their tokens together, each with its share of them.

    Those of older policies have shares too, and are idle where a rank has none.
    """
    versions = sorted({version for each in microbatches for version in each.older})
    older = {
        version: _with_shares([each.older.get(version, idle_microbatch()) for each in microbatches])
        for version in versions
    }
    return [
        replace(each, older={version: older[version][rank] for version in versions})
        for rank, each in enumerate(_with_shares(microbatches))
    ]


def _with_shares(microbatches: Sequence[MicroBatch]) -> list[MicroBatch]:
    num_ranks = len(microbatches)
    sizes = np.array([len(each.token_ids) for each in microbatches])
    starts, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    owners = np.arange(num_ranks).repeat(sizes)
    bounds = np.minimum(np.arange(2 * num_ranks + 1) * -(-total // (2 * num_ranks)), total)
    parts = [np.arange(first, last) for first, last in pairwise(bounds.tolist())]
    halves = [(parts[rank], parts[2 * num_ranks - 1 - rank]) for rank in range(num_ranks)]
    of_rank = [np.concatenate(each) for each in halves]
    longest = max(map(len, of_rank))
    gathered = np.empty(total, dtype=np.int64)
    for rank, tokens in enumerate(of_rank):
        gathered[tokens] = rank * longest + np.arange(len(tokens))
    token_ids = torch.cat([each.token_ids for each in microbatches])
    position_ids = torch.cat([each.position_ids for each in microbatches])
    known = [each.routes for each in microbatches if not each.is_idle]
    routes = _joined_routes(microbatches) if known and all(each is not None for each in known) else None
    spans = [span for start, each in zip(starts.tolist(), microbatches, strict=True) for span in _spans(each, start)]
    found = []
    for rank, microbatch in enumerate(microbatches):
        tokens = of_rank[rank]
        order = np.argsort(owners[tokens], kind="stable")
        arriving = [each[owners[each] == rank] for each in of_rank]
        places = np.empty(sizes[rank], dtype=np.int64)
        places[np.concatenate(arriving) - starts[rank]] = np.arange(sizes[rank])
        own_parts = [(half[0], half[-1] + 1) for half in halves[rank] if len(half)]
        share = TokenShare(
            token_ids=token_ids[tokens],
            position_ids=position_ids[tokens],
            routes=None if routes is None else routes[tokens],
            layout=_layout(own_parts, spans, gathered),
            longest=longest,
            order=torch.from_numpy(order),
            sent=tuple(np.bincount(owners[tokens], minlength=num_ranks).tolist()),
            places=torch.from_numpy(places),
            received=tuple(map(len, arriving)),
        )
        found.append(replace(microbatch, share=share))
    return found


def _joined_routes(microbatches: Sequence[MicroBatch]) -> Tensor:
    """Joins the routes of micro-batches; an idle one's router chooses."""
    (shape,) = {each.routes.shape[1:] for each in microbatches if each.routes is not None}
    free = torch.full((1, *shape), UNKNOWN_EXPERT, dtype=torch.int16)
    return torch.cat([free if each.routes is None else each.routes for each in microbatches])


def _spans(microbatch: MicroBatch, start: int) -> list[tuple[int, int, np.ndarray]]:
    """Returns where each span starts and stops among the joined tokens, and its keys; `start` is the micro-batch's
    first token there."""
    layout = microbatch.layout
    queries, keys = (bounds.tolist() for bounds in (layout.query_bounds, layout.key_bounds))
    all_keys = layout.key_tokens.numpy() + start
    return [
        (start + queries[n], start + queries[n + 1], all_keys[keys[n] : keys[n + 1]]) for n in range(len(queries) - 1)
    ]


def _layout(
    parts: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, np.ndarray]], gathered: np.ndarray
) -> PackedLayout:
    """Returns the layout of the spans' pieces within the parts. gathered: [T], the place of each joined token among the
    gathered ones."""
    sizes, keys = [], []
    for first, last in parts:
        for start, stop, of_span in spans:
            low, high = max(first, start), min(last, stop)
            if low < high:
                sizes.append(high - low)
                keys.append(gathered[of_span[: len(of_span) - (stop - high)]])
    counts = [len(each) for each in keys]
    query_bounds, key_bounds = (
        torch.from_numpy(np.concatenate([[0], np.cumsum(each)]).astype(np.int32)) for each in (sizes, counts)
    )
    return PackedLayout(
        buckets=(),
        slots=torch.empty(0, dtype=torch.int64),
        key_tokens=torch.from_numpy(np.concatenate(keys)),
        query_bounds=query_bounds,
        key_bounds=key_bounds,
        longest_query=max(sizes),
        longest_keys=max(counts),
    )
