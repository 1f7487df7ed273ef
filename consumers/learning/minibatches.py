"""Splits a batch into the groups of each optimizer step."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup


def minibatches_of(groups: Sequence[RolloutGroup], config: RunConfig) -> Iterator[Sequence[RolloutGroup]]:
    """Yields the groups of each of `trainer.num_minibatches` mini-batches: in order in synchronous mode, shuffled by
    `seed` and their indexes in asynchronous mode, in which batches fill with short answers first.

    Sizes differ by at most one; there are fewer parts if there are fewer groups.
    """
    count = config.trainer.num_minibatches
    if count > 1 and config.mode == "asynchronous":
        source = random.Random(f"{config.seed}:{[group.index for group in groups]}")
        groups = source.sample(groups, len(groups))
    bounds = [len(groups) * n // count for n in range(count + 1)]
    return (groups[start:end] for start, end in pairwise(bounds) if end > start)
