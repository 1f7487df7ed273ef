"""Tasks of the library reasoning-gym: generated questions of a hundred kinds, scored by the library itself."""

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from penstock.producers.environments.dataset import permuted
from penstock.producers.environments.scoring_process import ScoringProcess
from penstock.schemas.prompt import Message, Prompt, Reward

MOST_ITEMS = 1_000_000
"""The most items of a task in a training set, and in the held-out set."""
_MOST_SEEDS = 1_000
_DRAWS = 16
"""Held-out items at most, for each that is wanted: tasks with few questions repeat them."""
_ATTEMPTS = 256
"""Training items tried in place of one that is held out."""
_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")


def tagged(completion: str) -> str:
    """Returns what is in the last `<answer></answer>`, as the library reads it; empty without one."""
    from reasoning_gym.utils import extract_answer

    return extract_answer(completion) or ""


def last_number(completion: str) -> str:
    """Returns the last number of a completion; empty without one."""
    return (_NUMBER.findall(completion) or [""])[-1]


ANSWERS: dict[str, Callable[[str], str]] = {"tag": tagged, "last_number": last_number, "whole": str.strip}
"""How the answer is found in a completion."""
ItemKey = tuple[str, str, int]
"""Task, set (`training` or `held out`) and number of an item."""


class ReasoningGym:
    """Tasks by their names in the library, posed in turn. Needs `pip install 'penstock[reasoning-gym]'`.

    The reward is that of the library's `score_answer`, 0 for an answer that it cannot read; its part `solved` is 1 for
    a reward of 1. Some of these scorers evaluate the answer as Python (countdown, n_queens and others): they run in a
    process of their own that can start no program, but can read and write files as the producer can. Producers of such
    tasks should run in a container, or as a user with few rights.

    Held-out items have seeds that no training set has, different questions, and are the same for every run. A training
    item whose question is held out gives way to another.

    tasks: the settings of each task by its name, `{}` for the library's defaults.
    size: training items of each task, after which they repeat.
    num_evaluation_prompts: held-out items of all tasks together.
    answer: what of a completion is the answer: `tag`, in `<answer></answer>`; `last_number`; `whole`, all of it.
    system_prompt: a message before every question. By default the library's own for `tag`, none for the others.
    scoring_timeout_s: an answer that takes longer to score is worth 0.

    Raises:
        ValueError: no such task, settings that the task refuses, or too few different questions.
        ImportError: the library is not installed.
    """

    reward_threads = 1
    """The scoring process takes one answer at a time."""

    def __init__(
        self,
        *,
        seed: int,
        tasks: Mapping[str, Mapping[str, Any]],
        size: int = 10_000,
        num_evaluation_prompts: int = 64,
        answer: str = "tag",
        system_prompt: str | None = None,
        scoring_timeout_s: float = 5.0,
    ) -> None:
        for name, value, least in (("size", size, 1), ("num_evaluation_prompts", num_evaluation_prompts, 0)):
            if not least <= value <= MOST_ITEMS:
                raise ValueError(f"ReasoningGym: {name} is {value}, expected {least} to {MOST_ITEMS}")
        if answer not in ANSWERS:
            raise ValueError(f"ReasoningGym: answer is {answer!r}, expected one of {', '.join(ANSWERS)}")
        if not tasks:
            raise ValueError("ReasoningGym: tasks is empty, expected names and settings, as in { chain_sum = {} }")
        # Item k is drawn from its data set's seed + k: sets with neighbouring seeds would share nearly all items.
        first = MOST_ITEMS * (1 + seed % _MOST_SEEDS) * _DRAWS
        num_draws = max(1, num_evaluation_prompts * _DRAWS)
        self._sets = _opened(tasks, first, size, num_draws)
        modules = {type(each).__module__ for each in self._sets["training"].values()}  # a user's own registers itself
        how = (modules, tasks, first, size, num_draws)
        self._scorer = ScoringProcess("ReasoningGym", _scores, *how, timeout_s=scoring_timeout_s)
        self._find, self._system = ANSWERS[answer], _system(answer, system_prompt)
        self._names, self._size = tuple(tasks), size
        self.num_tasks = size * len(tasks)
        self.num_evaluation_prompts = num_evaluation_prompts
        self._item = functools.lru_cache(4096)(self._drawn)
        draws = {name: self._different(name, num_draws) for name in self._names}
        self._evaluation = [next(draws[self._names[n % len(tasks)]]) for n in range(num_evaluation_prompts)]
        self._held_out = {self._item(key)["question"] for key in self._evaluation}

    def prompt(self, index: int) -> Prompt:
        row, turn = divmod((index - 1) % self.num_tasks, len(self._names))
        name = self._names[turn]
        for attempt in range(_ATTEMPTS):
            key = (name, "training", permuted(row, self._size, name, attempt) if attempt else row)
            if self._item(key)["question"] not in self._held_out:
                return self._pose(key)
        raise ValueError(
            f"ReasoningGym: {_ATTEMPTS} training items of {name} in turn are held out; expected a smaller "
            "num_evaluation_prompts, or settings of the task with more questions"
        )

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._pose(self._evaluation[n - 1])

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        task, which, number = (prompt.metadata[name] for name in ("task", "set", "item"))
        item, answer = self._item((task, which, int(number))), self._find(completion)
        value = self._scorer.value(which, task, answer, item)
        return Reward(value=value, parts={"solved": float(value >= 1.0)})

    def _pose(self, key: ItemKey) -> Prompt:
        item, (task, which, number) = self._item(key), key
        return Prompt(
            messages=(*self._system, Message(role="user", content=item["question"])),
            answer=str(item["answer"] or ""),  # a puzzle with many solutions has none
            metadata={"task": task, "set": which, "item": str(number)},
        )

    def _drawn(self, key: ItemKey) -> dict[str, Any]:
        task, which, number = key
        return self._sets[which][task][number]

    def _different(self, name: str, num_draws: int) -> Iterator[ItemKey]:
        """Yields the held-out items of a task, each question once."""
        seen = set()
        for number in range(num_draws):
            key = (name, "held out", number)
            if (question := self._item(key)["question"]) not in seen:
                seen.add(question)
                yield key
        raise ValueError(
            f"ReasoningGym: num_evaluation_prompts asks for more questions of {name} than the {len(seen)} different "
            f"ones among {num_draws}; expected fewer, or settings of the task with more questions"
        )


def _system(answer: str, system_prompt: str | None) -> tuple[Message, ...]:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    content = SYSTEM_PROMPTS["default"] if system_prompt is None and answer == "tag" else system_prompt
    return () if content is None else (Message(role="system", content=content),)


def _opened(tasks: Mapping[str, Any], first: int, size: int, num_draws: int) -> dict[str, dict[str, Any]]:
    """Returns the two data sets of each task."""
    return {
        "training": {name: _open(name, settings, first, size) for name, settings in tasks.items()},
        "held out": {name: _open(name, settings, 0, num_draws) for name, settings in tasks.items()},
    }


def _scores(modules: set[str], *how: Any) -> Callable[[str, str, str, dict[str, Any]], float]:
    """Returns what scores answers in the scoring process, whose data sets are opened as the producer's are."""
    for module in modules:
        importlib.import_module(module)
    sets = _opened(*how)
    return lambda which, task, answer, item: sets[which][task].score_answer(answer, item)


def _open(name: str, settings: Mapping[str, Any], seed: int, size: int) -> Any:
    """Returns a data set of the library."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'penstock[reasoning-gym]'") from error
    if name not in DATASETS:
        close = get_close_matches(name, DATASETS) or sorted(DATASETS)
        raise ValueError(f"ReasoningGym: tasks has {name!r}, expected one of the library's, as {', '.join(close)}")
    if not isinstance(settings, Mapping) or {"seed", "size"} & settings.keys():
        raise ValueError(f"ReasoningGym: tasks.{name} = {settings!r}, expected its settings without seed and size")
    try:
        return create_dataset(name, seed=seed, size=size, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"ReasoningGym: tasks.{name} = {dict(settings)}: the library refuses it: {error}") from error
