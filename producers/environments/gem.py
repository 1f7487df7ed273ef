"""Environments of the library GEM (gem-llm), unchanged: games, reasoning, mathematics, questions, with its tools."""

import asyncio
import copy
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.producers.environments.global_random import GlobalRandom
from penstock.producers.environments.stepping import (
    MAX_TURNS,
    Episode,
    SeededTasks,
    Step,
    library,
    text_of,
    unknown,
)

SHARED = ("dataset", "mp_pool")
"""What episodes have in common: data, and a process that grades."""


class GemEnvironment(SeededTasks):
    """An environment that `gem.make` makes, in a conversation: each answer is an action, each message an observation,
    with the prefix and the suffix that the environment gives with it.

    The reward is the sum of all steps. Of an environment with a data set, a seed draws a row.

    id: a registered environment. args: of `gem.make`. wrappers: names of GEM's wrappers, the innermost first, such as
        `python_tool`. num_evaluation_prompts: how many tasks are held out.

    Raises:
        ValueError: the environment cannot be made or begun, or its observations are no text.
        ImportError: gem is not installed.
    """

    def __init__(
        self,
        *,
        seed: int,
        id: str,
        args: Mapping[str, Any] | None = None,
        wrappers: Sequence[str] = (),
        num_evaluation_prompts: int = 64,
        max_turns: int = MAX_TURNS,
    ) -> None:
        super().__init__(seed=seed, num_evaluation_prompts=num_evaluation_prompts, max_turns=max_turns)
        gem = library("gem", "gem", ", then pip install --no-deps gem-llm==0.1.0")
        if id not in (known := library("gem.envs.registration", "gem").ENV_REGISTRY):
            raise unknown(id, known)
        if wrappers:
            factory = library("gem.wrappers.wrapper_factory", "gem").WRAPPER_FACTORY
            for name in wrappers:
                if name not in factory:
                    raise ValueError(f"wrappers = {list(wrappers)}: no {name!r}, expected of {', '.join(factory)}")
        try:
            self._made = gem.make(id, **(args or {}))
            for name in wrappers:
                self._made = factory[name](self._made)
            _Episode(self._made, 0)
        except Exception as error:  # the library's environments raise anything
            raise ValueError(f"id = {id!r}: {type(error).__name__}: {error}") from error

    def pose(self, seed: int) -> str:
        return _Episode(self._made, seed).said

    async def begin(self, seed: int) -> "_Episode":
        return await asyncio.to_thread(_Episode, self._made, seed)


class _Episode(Episode):
    """An episode, begun. said: the first observation."""

    def __init__(self, made: Any, seed: int) -> None:
        shared = [getattr(made.unwrapped, name, None) for name in SHARED]
        self._random = GlobalRandom(seed)
        with self._random.lent():
            self._environment = copy.deepcopy(made, {id(each): each for each in shared})
            self.said = _told(*self._environment.reset(seed=seed))

    async def step(self, action: str) -> Step:
        return await asyncio.to_thread(self._step, action)

    def _step(self, action: str) -> Step:
        with self._random.lent():
            observed, reward, is_terminated, is_truncated, facts = self._environment.step(action)
        if is_terminated or is_truncated:
            return Step([], reward, True)
        return Step([{"role": "user", "content": _told(observed, facts)}], reward, False)


def _told(observed: Any, facts: Mapping[str, Any]) -> str:
    text = text_of(observed, "an observation")
    return facts.get("prefix", "") + "\n".join(filter(None, (text.rstrip("\n"), facts.get("suffix", ""))))
