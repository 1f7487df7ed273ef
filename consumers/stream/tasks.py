"""Assigns a task to each index: an environment by index, seed and weights, then that environment's next task."""

import functools
import hashlib
import inspect
import math
import operator
from collections import Counter
from collections.abc import Mapping

from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.stream.curricula import Curriculum
from penstock.consumers.stream.ledger import Ledger, RunFailedError
from penstock.schemas.config import DEFAULT_CURRICULUM, ConfigError, Plug, RunConfig, environment_fields
from penstock.schemas.process.plugins import resolve

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd."""


def environment_of(index: int, seed: int, weights: Mapping[str, float]) -> str:
    """Returns the environment of an index: a pure function that gives each environment its share of every range of
    indexes, to within a few.

    The multiples of the golden ratio, modulo 1, are spread as evenly as possible (Kuipers and Niederreiter, Uniform
    Distribution of Sequences, 1974, chapter 2.3); each environment is an interval as long as its weight.
    """
    place = (_seed(seed) + index * _GOLDEN) % 2**64 / 2**64 * sum(weights.values())
    for name, weight in weights.items():
        place -= weight
        if place < 0:
            return name
    return max(weights, key=weights.__getitem__)  # rounding, at the end of the last interval


def make_curriculum(plug: Plug) -> Curriculum:
    """Returns the run file's curriculum with its arguments bound.

    Raises:
        ConfigError: it cannot be imported, or is not a function of a history, a budget and a seed.
    """
    function = resolve(plug, "curriculum")
    try:
        inspect.signature(function).bind(None, 1, 0, **plug.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"curriculum.path = {plug.path!r}: {error}; expected a function (history: TaskHistory, budget: int, "
            "seed: int, **kwargs) -> Sequence[int]"
        ) from None
    return functools.partial(function, **plug.kwargs)


class TaskPlan:
    """Chooses tasks. A released index keeps its task in ledger and checkpoint and, if it was released since the last
    checkpoint, in Redis.

    Raises:
        ConfigError: see `make_curriculum`; or an environment from which it chooses has no number of tasks.
    """

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._seed = config.seed
        self._weights = {name: each.weight for name, each in config.every_environment.items()}
        self._ledger = ledger
        self._path = config.curriculum.path
        self._curriculum = make_curriculum(config.curriculum)
        for field, each in environment_fields(config):
            size = 0 if config.curriculum.path == DEFAULT_CURRICULUM else each.num_tasks
            if size is None and each.weight:
                raise ConfigError(
                    f"{field}.num_tasks is not set: curriculum.path = {self._path!r} chooses among so many tasks, and "
                    "the environment has no `num_tasks`"
                )
            ledger.histories[each.name].resize(size or 0)

    def next(self, count: int) -> list[ReleasedTask]:
        """Returns the tasks of the next `count` indexes, or of fewer if an environment has fewer tasks.

        Raises:
            RunFailedError: the curriculum raised, or returned something other than requested.
        """
        ledger = self._ledger
        names: list[str] = []
        budgets: Counter[str] = Counter()
        for index in range(ledger.num_released + 1, ledger.num_released + count + 1):
            name = environment_of(index, self._seed, self._weights)
            if budgets[name] == (ledger.histories[name].num_tasks or count):
                break
            names.append(name)
            budgets[name] += 1
        numbers = {name: iter(self._chosen(name, budget)) for name, budget in budgets.items() if budget}
        return [ReleasedTask(name, next(numbers[name])) for name in names]

    def catch_up(self, num_released: int, released: Mapping[bytes, bytes]) -> None:
        """Adds the indexes released after the checkpoint to the ledger, with their tasks in `Keys.tasks`. A task that
        Redis has lost is chosen again."""
        while self._ledger.num_released < num_released:
            number, _, name = released.get(b"%d" % (self._ledger.num_released + 1), b"").partition(b" ")
            self._ledger.release(ReleasedTask(name.decode(), int(number)) if name else self.next(1)[0])

    def _chosen(self, name: str, budget: int) -> list[int]:
        """Returns the curriculum's choice of an environment's tasks, after checking it."""
        history = self._ledger.histories[name]
        asked = f"curriculum.path = {self._path!r}, asked for {budget} tasks of environment {name!r}"
        try:
            chosen = [operator.index(number) for number in self._curriculum(history, budget, _seed(self._seed, name))]
        except Exception as error:  # the function may be the user's
            raise RunFailedError(f"{asked}: {type(error).__name__}: {error}") from error
        if len(chosen) != budget:
            raise RunFailedError(f"{asked}: returned {len(chosen)}")
        if twice := [number for number, times in Counter(chosen).items() if times > 1]:
            raise RunFailedError(f"{asked}: returned task {twice[0]} twice; expected each once")
        last = history.num_tasks or math.inf
        if unknown := [number for number in chosen if not 1 <= number <= last]:
            raise RunFailedError(f"{asked}: returned task {unknown[0]}, expected 1 to {last}")
        return chosen


def _seed(*parts: int | str) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())
