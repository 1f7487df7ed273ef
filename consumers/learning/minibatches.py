"""The groups of each optimizer step of a batch."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup


def minibatches_of(groups: Sequence[RolloutGroup], config: RunConfig) -> Iterator[Sequence[RolloutGroup]]:
    """The groups of each of `trainer.num_minibatches` mini-batches: in their order in synchronous mode, in asynchronous
    mode shuffled by `seed` and their indexes, because batches fill with short answers first.

    Sizes differ by one at most; there are fewer parts if there are fewer groups.
    """
    count = config.trainer.num_minibatches
    if count > 1 and config.mode == "asynchronous":
        source = random.Random(f"{config.seed}:{[group.index for group in groups]}")
        groups = source.sample(groups, len(groups))
    bounds = [len(groups) * n // count for n in range(count + 1)]
    return (groups[start:end] for start, end in pairwise(bounds) if end > start)
