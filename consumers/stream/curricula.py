"""Chooses an environment's next tasks: pure functions of the tasks' history, named by a run file's `[curriculum]`.

    uniform          the environment's tasks in order, without end
    drop_flat        in shuffled passes; tasks whose last groups had no reward variance skip more and more passes
    by_solve_rate    drawn by p (1 - p), p the solve rate: tasks solved half of the time first

`drop_flat` is online difficulty filtering: a task that is always or never solved has no advantage (DAPO, arXiv
2503.14476, section 3.2, drops such groups). That may change as the policy learns, so the task is retried at growing
intervals, as in GRESO (arXiv 2506.02177), which skips it with a probability. `by_solve_rate` is sampling for
learnability (arXiv 2408.15099; for language models arXiv 2502.12272): p (1 - p) is the variance of a reward of 0 or 1.
Departure: no completion is sampled for the estimate alone: p is estimated from the groups that were released.

Draws use hashes of seed and counts, so that the same history gives the same tasks on every machine.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.consumers.stream.history import TaskHistory

_OPEN = np.uint64(1 << 63)
_LONGEST = 20
"""A task skips at most 2 to this power passes."""


class Curriculum(Protocol):
    """A pure function that returns the next `budget` tasks of an environment, from 1 to `history.num_tasks`, each once.

    budget: at most `history.num_tasks`. seed: different for every environment.
    """

    def __call__(self, history: TaskHistory, budget: int, seed: int) -> Sequence[int]: ...


def uniform(history: TaskHistory, budget: int, seed: int) -> Sequence[int]:
    """Returns the numbers after those released; the only curriculum for environments without a number of tasks."""
    return range(history.num_released + 1, history.num_released + 1 + budget)


def drop_flat(history: TaskHistory, budget: int, seed: int, *, after: int = 2) -> Sequence[int]:
    """Returns tasks in shuffled passes. A task whose last `after` groups had no reward variance skips the next pass; if
    it has none again, the next 2, then 4, 8 and so on. Open tasks come last.

    Raises:
        ValueError: `after` is less than 1.
    """
    if after < 1:
        raise ValueError(f"after is {after}, expected 1 or more")
    waits = np.int64(1) << np.clip(history.flat.astype(np.int64) - after, 0, _LONGEST)
    passes = history.last_pass + np.where(history.flat >= after, waits, 0)
    shuffled = _hashes(seed, passes, history.num_tasks) >> np.uint64(34)
    return _smallest(passes.astype(np.uint64) << np.uint64(30) | shuffled, history, budget)


def by_solve_rate(history: TaskHistory, budget: int, seed: int, *, floor: float = 0.05) -> Sequence[int]:
    """Draws tasks without replacement with the weight 4 p (1 - p) + floor, where p = 1/2 for untried tasks; open tasks
    only if there are no others. It takes the largest log(u) / weight (Efraimidis and Spirakis, 2006).

    Raises:
        ValueError: `floor` is not above 0: a task that was never solved would never be tried again.
    """
    if not floor > 0:
        raise ValueError(f"floor is {floor}, expected above 0")
    p = np.where(np.isnan(history.solve_rate), 0.5, history.solve_rate.astype(np.float64))
    draws = np.full(history.num_tasks, history.num_released)
    u = ((_hashes(seed, draws, history.num_tasks) >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    key = np.abs(np.log(u)) / (4 * p * (1 - p) + floor)
    return _smallest(key.view(np.uint64), history, budget)  # floats from 0 are in the order of their bits


def _smallest(key: np.ndarray, history: TaskHistory, count: int) -> list[int]:
    """Returns the task numbers, from 1, of the `count` smallest keys, which are below 2**63, in ascending order; open
    tasks last."""
    key = key | np.where(history.num_open > 0, _OPEN, np.uint64(0))
    found = np.argpartition(key, count - 1)[:count] if count else np.zeros(0, np.int64)
    return (found[np.argsort(key[found], kind="stable")] + 1).tolist()


def _hashes(seed: int, counts: np.ndarray, num_tasks: int) -> np.ndarray:
    """Hashes seed, count and task to [num_tasks] uint64: SplitMix64's output function (Steele, Lea, Flood, 2014)."""
    mixed = np.full(num_tasks, seed % 2**64, np.uint64)
    for part in (counts.astype(np.uint64), np.arange(num_tasks, dtype=np.uint64)):
        mixed = (mixed ^ part) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed
