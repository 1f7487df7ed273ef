"""Which task each index stands for: its environment by index, seed and weights, then the next task of it."""

import hashlib
from collections import Counter
from collections.abc import Mapping

from penstock.consumers.stream.ledger import Ledger, ReleasedTask
from penstock.schemas.config import RunConfig

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd."""


def environment_of(index: int, seed: int, weights: Mapping[str, float]) -> str:
    """The environment that an index is of: a pure function, by which each environment has its share of every stretch of
    indexes, to within a few.

    The multiples of the golden ratio, modulo 1, are spread as evenly as a sequence can be (Kuipers and Niederreiter,
    Uniform Distribution of Sequences, 1974, chapter 2.3); environments are intervals as long as their weights.
    """
    start = int.from_bytes(hashlib.blake2b(f"environments:{seed}".encode(), digest_size=8).digest())
    place = (start + index * _GOLDEN) % 2**64 / 2**64 * sum(weights.values())
    for name, weight in weights.items():
        place -= weight
        if place < 0:
            return name
    return max(weights, key=weights.__getitem__)  # rounding, at the end of the last interval


class TaskPlan:
    """Decides on tasks. An index that was released keeps its own in ledger and checkpoint, and, if it was released
    since the last one, in Redis."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._seed = config.seed
        self._weights = {name: each.weight for name, each in config.every_environment.items()}
        self._ledger = ledger

    def next(self, count: int) -> list[ReleasedTask]:
        """The tasks of the next indexes."""
        ahead: Counter[str] = Counter()
        tasks: list[ReleasedTask] = []
        for index in range(self._ledger.num_released + 1, self._ledger.num_released + count + 1):
            name = environment_of(index, self._seed, self._weights)
            ahead[name] += 1
            tasks.append(ReleasedTask(name, self._ledger.num_tasks[name] + ahead[name]))
        return tasks

    def catch_up(self, num_released: int, released: Mapping[bytes, bytes]) -> None:
        """Books indexes that were released after the checkpoint, by the content of `Keys.tasks`. One that Redis has
        lost is decided on anew."""
        while self._ledger.num_released < num_released:
            number, _, name = released.get(b"%d" % (self._ledger.num_released + 1), b"").partition(b" ")
            self._ledger.release(ReleasedTask(name.decode(), int(number)) if name else self.next(1)[0])
