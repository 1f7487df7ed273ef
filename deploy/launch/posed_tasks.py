"""Poses some of a run's tasks before anything is started: the first, the last, and some between. Run as a program, it
does so for the configuration on its standard input, and writes the prompts to its standard output."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.producers.rollout.run_environments import RunEnvironment, RunEnvironments, open_environments, pose
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
            raise _differs(PosedTask(asked, source, prompt), again[number], "when it is asked twice")
        yield PosedTask(asked, source, prompt)


def check_in_another_process(config: RunConfig, tasks: Sequence[PosedTask]) -> None:
    """Poses the tasks again in a new process, unless all environments are Penstock's own.

    Raises:
        ConfigError: a task differs there, or cannot be posed.
    """
    if all(plug.path.startswith("penstock.") for _, plug in environment_fields(config)):
        return
    done = subprocess.run(
        (sys.executable, "-m", __name__),
        input=msgspec.json.encode(config),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode:
        *_, said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(f"a second process cannot pose the tasks that this one poses: {one_line(said)}")
    for task, prompt in zip(tasks, msgspec.msgpack.decode(done.stdout, type=list[Prompt]), strict=True):
        if task.prompt != prompt:
            raise _differs(task, prompt, "between processes, as with hash() or the order of a set")


def _differs(task: PosedTask, prompt: Prompt, when: str) -> ConfigError:
    first, second = (one_line(str(each.text or each.messages)) for each in (task.prompt, prompt))
    name = task.asked.rpartition(": ")[2].partition("(")[0]
    return ConfigError(
        f"{task.asked} differs {when}, {first} and {second}, or in its answer or metadata; expected the same task for "
        f"an index, always and in every process{definition(_method(task.source, name))}"
    )


def _method(source: RunEnvironment, name: str) -> Any:
    return getattr(type(source.environment), name, None)


def _spread(last: int) -> set[int]:
    """Returns the first numbers up to `last`, the last one, and some between."""
    between = {last * part // _PARTS for part in range(1, _PARTS + 1)}
    return {number for number in {*range(1, _FIRST + 1), *between} if 1 <= number <= last}


if __name__ == "__main__":
    standard_output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the environment prints
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=RunConfig)
    prompts = [task.prompt for task in pose_tasks(given, open_environments(given))]
    standard_output.write(msgspec.msgpack.encode(prompts))
    standard_output.close()
