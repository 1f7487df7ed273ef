"""Divides a batch into optimizer steps, and its rows among the ranks: equal cost, siblings together."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeVar

from penstock.consumers.learning.batch.layout import Arrangement
from penstock.schemas.config import RunConfig
from penstock.schemas.rollout import RolloutGroup

ALLOWED = 0.05
"""A rank's cost above the mean, relative to it, above which siblings are separated."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Sharing:
    """num_ranks: the ranks that share a batch. even_length: tokens of a row above which attention's products cost more
    than those of the weights. arrangement: of the rows of a forward pass. per_pass:
    consecutive ranks that compute their micro-batches' tokens together."""

    num_ranks: int = 1
    even_length: float = math.inf
    arrangement: Arrangement = "packed"
    per_pass: int = 1

    def cost(self, num_tokens: int) -> float:
        """Returns a row's cost, attention's quadratic share included, in units of a token without attention."""
        return num_tokens * (1 + num_tokens / self.even_length)


ALONE = Sharing()


def shared_out(groups: Sequence[list[Row]], cost: Callable[[Row], float], num_ranks: int) -> list[list[Row]]:
    """Returns the rows of each rank, in order.

    Whole groups first, the costliest to the least loaded rank (Graham, "Bounds on multiprocessing timing anomalies",
    1969); then single rows from the most to the least loaded rank, while that evens the load. Separated siblings store
    their prompt once more.
    """
    place = {id(row): number for number, row in enumerate(chain.from_iterable(groups))}
    shares: list[list[Row]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for group in sorted(groups, key=lambda group: -sum(map(cost, group))):
        least = loads.index(min(loads))
        shares[least] += group
        loads[least] += sum(map(cost, group))
    while True:
        most, least = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[most] - loads[least]
        movable = [row for row in shares[most] if 0 < cost(row) < gap]
        if max(loads) <= (1 + ALLOWED) * sum(loads) / num_ranks or not movable:
            return [sorted(share, key=lambda row: place[id(row)]) for share in shares]
        best = min(movable, key=lambda row: (abs(gap / 2 - cost(row)), place[id(row)]))
        shares[most].remove(best)
        shares[least].append(best)
        loads[most] -= cost(best)
        loads[least] += cost(best)


def spread(rows: list[Row], size: Callable[[Row], int], num_parts: int) -> list[list[Row]]:
    """Splits rows into `num_parts` consecutive parts with the smallest possible largest size; the last may be empty."""
    low, high = max(map(size, rows), default=0), sum(map(size, rows))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(rows, size, middle)) <= num_parts else (middle + 1, high)
    parts = _filled(rows, size, low)
    return [*parts, *([] for _ in range(num_parts - len(parts)))]


def _filled(rows: list[Row], size: Callable[[Row], int], limit: int) -> list[list[Row]]:
    parts: list[list[Row]] = []
    used = limit
    for row in rows:
        if used + size(row) > limit:
            parts.append([])
            used = 0
        parts[-1].append(row)
        used += size(row)
    return parts


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
