"""Poses some of a run's tasks before anything is started: the first, the last, and some between."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.producers.rollout.run_environments import RunEnvironment, RunEnvironments, pose
from penstock.schemas.config import DEFAULT_CURRICULUM, ConfigError, EnvironmentConfig, RunConfig, environment_fields
from penstock.schemas.process.plugins import definition, ends_caller, place_in
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import one_line, shown_error

_FIRST = 8
_PARTS = 4


class PosedTask(NamedTuple):
    """asked: the environment's field and path, and the call, for messages."""

    asked: str
    source: RunEnvironment
    prompt: Prompt


def pose_tasks(config: RunConfig, environments: RunEnvironments, *, first_alone: bool = False) -> list[PosedTask]:
    """Poses tasks of each kind that the run may pose, each twice; with `first_alone` only the first of each kind.

    Raises:
        ConfigError: the environment raises or returns no Prompt, or a task differs when it is asked twice.
    """
    return [
        task
        for field, plug in environment_fields(config)
        for held_out, last in _kinds(config, plug)
        for task in _posed(field, plug, environments.named(plug.name), held_out, min(last, 1) if first_alone else last)
    ]


def _kinds(config: RunConfig, plug: EnvironmentConfig) -> Iterator[tuple[bool, int]]:
    """Yields whether a kind of task is held out, and the number of the last one that the run may pose."""
    share = plug.weight and plug.weight / sum(each.weight for each in config.every_environment.values())
    planned = math.ceil(share * config.num_updates * config.groups_per_batch)
    is_uniform = config.curriculum.path == DEFAULT_CURRICULUM
    yield False, planned if is_uniform or plug.num_tasks is None else plug.num_tasks
    yield True, config.num_evaluation_prompts[plug.name] or 0


def _posed(
    field: str, plug: EnvironmentConfig, source: RunEnvironment, held_out: bool, last: int
) -> Iterator[PosedTask]:
    name = "evaluation_prompt" if held_out else "prompt"
    num_tasks = 0 if held_out else getattr(source.environment, "num_tasks", None) or 0
    numbers = sorted({*_spread(last), *_spread(min(last, num_tasks))})
    again: dict[int, Prompt] = {}
    prompts: dict[int, Prompt] = {}
    for posed, order in ((prompts, numbers), (again, numbers[::-1])):  # an environment with a state shows it so
        for number in order:
            try:
                posed[number] = pose(source.environment, number, held_out=held_out)
            except BaseException as error:  # the environment is the user's
                if ends_caller(error):
                    raise
                place = place_in(error, plug) or definition(_method(source, name))
                raise ConfigError(
                    f"{field}.path = {plug.path!r}: {name}({number}): {shown_error(error)}{place}; "
                    "`penstock try` shows where"
                ) from error
    for number, prompt in prompts.items():
        asked = f"{field}.path = {plug.path!r}: {name}({number})"
        if prompt != again[number]:
            first, second = (one_line(str(each.text or each.messages)) for each in (prompt, again[number]))
            raise ConfigError(
                f"{asked} differs when it is asked twice, {first} and {second}, or in its answer or metadata; expected "
                f"the same task for an index, always and in every process{definition(_method(source, name))}"
            )
        yield PosedTask(asked, source, prompt)


def _method(source: RunEnvironment, name: str) -> Any:
    return getattr(type(source.environment), name, None)


def _spread(last: int) -> set[int]:
    """Returns the first numbers up to `last`, the last one, and some between."""
    between = {last * part // _PARTS for part in range(1, _PARTS + 1)}
    return {number for number in {*range(1, _FIRST + 1), *between} if 1 <= number <= last}
