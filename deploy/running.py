"""Runs from Python: from settings to results, as `penstock run` does."""

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.deploy.launch.command_line import (
    DEFAULT_RUNS,
    RECIPE,
    check_environment,
    find_run_file,
    run_coroutine,
)
from penstock.deploy.launch.run_folder import RUN_FILE, RunFolder
from penstock.deploy.results import RunResult, report
from penstock.producers.interfaces import EngineError as EngineError
from penstock.schemas.best import BEST_FOLDER
from penstock.schemas.config import (
    AdvantageConfig,
    ConfigError,
    ObjectivePlug,
    Overrides,
    RunConfig,
    config_of,
    names_plug,
    overridden,
    read_document,
)

if TYPE_CHECKING:
    from penstock.deploy.evaluate.evaluation import Evaluated
    from penstock.deploy.launch.placement import Placement
    from penstock.deploy.launch.start_checks import Checked

Settings = RunConfig | Mapping[str, Any] | str | Path
"""A run's settings: a RunConfig, the tables of a run file as a dict, a run file, or the name of a shipped one."""
RewardFunction = Callable[..., Any] | str
"""A reward function, or its import path (docs/environments.md#rewards)."""
Callback = Callable[[dict[str, Any]], object]


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP (`number`) has stopped a run in order: its work is saved."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(f"run {name} was stopped in order; resume=True continues it")
        self.number = number


def load_config(
    config: Settings,
    *,
    set: Overrides = (),
    rewards: Sequence[RewardFunction | tuple[RewardFunction, float]] = (),
    name: str | None = None,
    runs: str | Path = DEFAULT_RUNS,
    resume: bool = False,
) -> RunConfig:
    """Returns the settings of a run, with every default. Arguments as those of `run`.

    Raises:
        ConfigError: no such file, an unknown or ill-typed field, settings that contradict each other, or a class or
            function that other processes cannot import.
    """
    fields = _importable(overridden(set), "set") | ({} if name is None else {"name": name})
    if rewards:
        fields["reward.components"] = [_component(each, f"rewards[{n}]") for n, each in enumerate(rewards)]
    if isinstance(config, RunConfig):
        return config_of(_importable(config, ""), Path("RunConfig"), fields)
    if isinstance(config, Mapping):
        document, file = _importable(config, ""), Path("config")
    elif isinstance(config, str | Path):
        document = read_document(file := find_run_file(Path(config)))
    else:
        raise ConfigError(f"config = {config!r}: expected a RunConfig, a dict, a run file or the name of a shipped one")
    if resume:
        own = Path(runs) / str(fields.get("name", document.get("name"))) / RUN_FILE
        if own.is_file() and not (file.is_file() and own.samefile(file)):
            print(f"penstock: resumed with {own}; {file} is not read again, --set changes a setting", file=sys.stderr)
            document, file = read_document(own), own
    return config_of(document, file, fields)


def _component(given: Any, field: str) -> dict[str, Any]:
    """Returns a table of `reward.components` for a function, or for one with its weight. Raises ConfigError."""
    function, weight = given if isinstance(given, tuple | list) and len(given) == 2 else (given, 1.0)
    if not (callable(function) or isinstance(function, str)):
        raise ConfigError(
            f"{field} = {given!r}: expected a function (prompt, completion) -> float, its import path, or one of these "
            "with its weight, as (function, 0.5)"
        )
    path = function if isinstance(function, str) else import_path(function, field)
    name = path.rpartition(":")[2].rpartition(".")[2]
    return {"name": name, "path": path, "weight": _importable(weight, f"{field}[1]")}


def _importable(given: Any, field: str) -> Any:
    """Copies settings as a run file can hold them: import paths in place of classes and functions, plain numbers in
    place of numpy's and torch's."""
    if given is None or type(given) in (bool, int, float, str, date, time, datetime):
        return given
    if isinstance(given, msgspec.Struct):
        given = msgspec.structs.asdict(given)
    if isinstance(given, Mapping):
        return {name: _importable(value, f"{field}.{name}".strip(".")) for name, value in given.items()}
    if isinstance(given, list | tuple | Set | range):
        return [_importable(value, f"{field}[{n}]") for n, value in enumerate(given)]
    if isinstance(given, Enum):
        return _importable(given.value, field)
    if not isinstance(given, type) and callable(getattr(given, "tolist", None)):  # numpy's and torch's numbers, arrays
        return given.tolist()
    if isinstance(given, str | Path):
        return str(given)
    if isinstance(given, Real | Decimal):
        return int(number) if (number := float(given)).is_integer() else number
    is_plug = names_plug(field.removeprefix("set."))
    if not callable(given):
        kind = type(given).__name__
        instead = f", or the class {kind} itself, its arguments in kwargs" if is_plug else ""
        raise ConfigError(f"{field} = {given!r}: an object of class {kind}; expected a value of a run file{instead}")
    path = import_path(given, field)
    return {"path": path} if is_plug else path


def import_path(given: Any, field: str) -> str:
    """Returns the import path of a class or a function, as in `my_lab.capitals:Capitals`. Raises ConfigError, which
    names `field`, if the processes of a run cannot import it."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if module == "__main__" or getattr(sys.modules.get(str(module)), str(name), None) is not given:
        where = "this notebook or script" if module == "__main__" else module
        raise ConfigError(
            f"{field} = {name or repr(given)} of {where}: the processes of a run cannot import it; expected a class or "
            "function at the top level of a module (a file such as my_lab.py), or its import path, as 'my_lab:Capitals'"
        )
    return f"{module}:{name}"


def check(
    config: Settings,
    *,
    set: Overrides = (),
    rewards: Sequence[RewardFunction | tuple[RewardFunction, float]] = (),
    name: str | None = None,
    runs: str | Path = DEFAULT_RUNS,
    resume: bool = False,
) -> RunConfig:
    """Checks that a run can be started, without starting it; prints warnings. Returns the settings, with every default.
    Arguments as those of `run`.

    Raises:
        ConfigError: the run cannot work; the message names the field, its value and what was expected.
    """
    asked = load_config(config, set=set, rewards=rewards, name=name, runs=runs, resume=resume)
    checked, _ = _checked(asked, Path(runs), resume=resume)
    return checked.config


def _checked(asked: RunConfig, runs: Path, *, resume: bool) -> "tuple[Checked, Placement]":
    from penstock.deploy.launch import start_checks
    from penstock.deploy.launch.posed_tasks import check_in_another_process
    from penstock.deploy.launch.prompt_checks import check_prompts

    check_environment()
    if (repo := asked.checkpoint.push_to_hub) is not None:
        from penstock.deploy.operate.hub import check_repo

        check_repo(repo, "checkpoint.push_to_hub")
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"WORLD_SIZE = {size!r}: a run starts the ranks of its trainer itself, trainer.num_processes of them; "
            "expected it to be unset"
        )
    checked = start_checks.check(asked)
    config = checked.config
    if resume:
        from penstock.deploy.operate.resumed import check_resumed

        checked.warnings.extend(check_resumed(config, runs))
    checked.warnings.extend(check_prompts(checked))
    check_in_another_process(config, checked.tasks)
    placement = start_checks.place_parts(config)
    if table := placement.table():
        print(table, file=sys.stderr)
    for warning in checked.warnings:
        print(f"penstock: warning: {warning}", file=sys.stderr)
    own = config.objective != ObjectivePlug() or config.advantage != AdvantageConfig()
    if own or config.teacher or config.model.reference or config.sampling.top_logprobs:
        start_checks.check_objective(config)  # imports torch
    return checked, placement


def run(
    config: Settings,
    *,
    set: Overrides = (),
    rewards: Sequence[RewardFunction | tuple[RewardFunction, float]] = (),
    name: str | None = None,
    runs: str | Path = DEFAULT_RUNS,
    resume: bool = False,
    stop: threading.Event | None = None,
    on_update: Callback | None = None,
    on_evaluation: Callback | None = None,
) -> RunResult:
    """Starts Redis, producers and trainer on this machine, follows them until the run ends, and writes its report.

    Progress goes to standard output. The parts of the run have this program's module search path. In the main thread
    Ctrl-C, SIGTERM and SIGHUP stop the run in order; a second one kills its parts.

    config: a RunConfig, the tables of a run file as a dict, a run file, or the name of a shipped one. A class or a
        function in a dict stands for its import path, or for a table with it (`"environment": Capitals`).
    set: fields to change, as in `{"trainer.learning_rate": 1e-5}`.
    rewards: functions whose weighted sum is the reward, each alone (weight 1) or with its weight, as in
        `[exact, (short, 0.1)]`: `reward.components`, named like the functions. "environment" is the environment's own.
    name: of the run, in place of that in `config`.
    runs: folder of all runs.
    resume: continues the run of this name from its last checkpoint, by the run file in its folder, changed by `set`; a
        RunConfig replaces that file. A complete run is not started again.
    stop: once another thread sets it, the run is stopped in order, and its results so far are returned.
    on_update, on_evaluation: called here with each new row of `load_updates` and `load_evaluations`, between two looks
        at the run's processes, which go on meanwhile. Once one returns "stop" the run is stopped in order, as by
        `stop`; what one raises is raised here once that is done, and resume=True continues the run.

    Raises:
        ConfigError: unusable settings; the message names the field, its value and what was expected.
        RunInterrupted: a signal has stopped the run in order.
        GateRefusedError: the parity gate refused to train.
        PartDied: a part of the run ended without which it cannot go on.
        ServerError: no Redis can be started or reached.
    """
    from penstock.deploy.launch.callbacks import Callbacks, check_callbacks

    check_callbacks(on_update=on_update, on_evaluation=on_evaluation)
    runs = Path(runs)
    asked = load_config(config, set=set, rewards=rewards, name=name, runs=runs, resume=resume)
    if resume:
        from penstock.deploy.report.lines import read_ledger

        ledger = read_ledger(asked.folder(runs) / "trainer.json")
        if ledger is not None and ledger.finished and ledger.num_updates >= asked.num_updates:
            print(
                f"run {asked.name} is complete, with {ledger.num_updates} updates; --set num_updates=N trains on to N"
            )
            return report(asked.folder(runs))
    (checked, _, _, tasks), placement = _checked(asked, runs, resume=resume)
    from penstock.deploy.launch.launcher import Launcher
    from penstock.deploy.launch.live_view import open_view
    from penstock.deploy.launch.producer_pool import PartDied
    from penstock.deploy.launch.start_checks import check_redis, image_bytes
    from penstock.deploy.parity.command import raise_gate_refusal

    check_redis(checked, resume=resume, num_image_bytes=image_bytes(tasks))
    with RunFolder(checked, runs, resume=resume) as folder:
        for difference in folder.save(checked):
            print(f"penstock: resumed with another setting: {difference}", file=sys.stderr)
        callbacks = Callbacks(folder.path, on_update, on_evaluation, stop := stop or threading.Event())
        with open_view(checked, runs) as view:
            launcher = Launcher(
                checked,
                runs,
                placement,
                resume=resume,
                view=view,
                lock=folder.lock,
                stop=stop,
                on_tick=callbacks.look,
            )
            try:
                status = launcher.run()
            except PartDied as death:
                if death.part == "trainer":
                    raise_gate_refusal(folder.path, death.started_s)
                raise
        if status == 0:
            callbacks.look()  # the last lines came after the last tick
    if callbacks.error is not None:
        state = "was stopped in order; resume=True continues it" if status else "is complete"
        callbacks.error.add_note(f"raised by a callback of run {checked.name}, which {state}")
        raise callbacks.error
    if status and not stop.is_set():
        raise RunInterrupted(checked.name, status - 128)
    result = report(folder.path)
    if (repo := checked.checkpoint.push_to_hub) is not None and result.model is not None:
        _push(result, repo)
    return result


def _push(result: RunResult, repo: str) -> None:
    """Uploads a complete run's model. It does not fail: the model is on the disk."""
    from penstock.deploy.operate.hub import HubError, push_to_hub

    checkpoint = BEST_FOLDER if result.best is not None else None
    try:
        print(f"pushed   {push_to_hub(result.folder, repo, checkpoint=checkpoint)}")
    except (HubError, ConfigError, OSError) as error:
        again = f"penstock push {result.folder} {repo}" + f" --checkpoint {checkpoint}" * bool(checkpoint)
        print(f"penstock: warning: the model is not on the Hub: {error}; `{again}` tries again", file=sys.stderr)


def trial_config(config: Settings | type, *, set: Overrides = ()) -> RunConfig:
    """Returns the settings of a trial: for an environment alone, those of a run with that environment only. Raises
    ConfigError if `config` is neither an environment nor settings."""
    if isinstance(config, type):
        config = import_path(config, "config")
    if not isinstance(config, str) or (file := Path(config)).exists():
        return load_config(config, set=set)
    if config.startswith(RECIPE) or (":" not in config and (file.suffix in ("", ".toml") or file.name != config)):
        return load_config(config, set=set)
    document: dict[str, Any] = {"name": "try", "model": {"path": ""}, "environment": {"path": config}}
    return config_of(document, file, _importable(overridden(set), "set"))


def try_environment(config: Settings | type, num_tasks: int = 4, *, set: Overrides = ()) -> bool:
    """Prints the first training tasks of an environment and its first held-out one, with completions and rewards.
    Trains nothing and starts no process.

    config: settings as for `run`, or an environment alone: its class, or its import path.

    Returns:
        False if the user's code raised, or the reward of a gold answer is 0; what it was is printed.

    Raises:
        ConfigError: the environment or the reward cannot be used, or the model cannot be loaded.
    """
    from penstock.deploy.launch.trial import show_tasks

    return run_coroutine(show_tasks(trial_config(config, set=set), num_tasks))


def evaluate(
    model: str | Path, config: Settings, *, set: Overrides = (), runs: str | Path = DEFAULT_RUNS, show: int = 0
) -> "Evaluated":
    """Evaluates a model on the held-out prompts of a run's environments. Trains nothing; boots an engine.

    Progress goes to standard error. Other output of this process, mostly the engine's, goes to a file, which is named
    and kept only if prompts or the engine failed. Numeric libraries that are imported from now on use
    `producers.num_threads` threads.

    model: a model's folder, or a run (its name or folder), of which the newest checkpoint is evaluated.
    config: settings as for `run`; they determine the prompts and the sampling.
    show: prompts of each set that the result has with an answer, `sets[0].shown`.

    Raises:
        ConfigError: unusable settings, no such model, or no held-out prompts.
        EngineError: the engine does not start or serve; the message names the file of its output.
        OSError: a run's checkpoint cannot be read or exported.
    """
    from penstock.deploy.evaluate.command import evaluate_model

    return evaluate_model(model, load_config(config, set=set), runs=runs, show=show)
