"""The `penstock` command."""

import argparse
import difflib
import os
import re
import shlex
import signal
import socket
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from penstock.consumers.stop_signals import StoppedError, StopSignals
from penstock.deploy.evaluate import command as evaluate
from penstock.deploy.inspector import command as inspector
from penstock.deploy.launch.command_line import (
    DEFAULT_RUNS,
    MODULES_PATH,
    Command,
    add_run,
    add_runs,
    add_set,
    limit_threads,
    run_as_ranks,
    shipped_run_files,
)
from penstock.deploy.launch.run_folder import resolved_toml, save_run_file
from penstock.deploy.operate import commands as operate
from penstock.deploy.parity import command as parity
from penstock.deploy.prometheus import command as prometheus
from penstock.deploy.record import command as record
from penstock.deploy.replay import command as replay
from penstock.deploy.results import print_result, report
from penstock.deploy.running import RunInterrupted, check, load_config, run, trial_config, try_environment
from penstock.deploy.watch import command as watch
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process import logs
from penstock.schemas.process.redis_url import place_of, redis_url

if TYPE_CHECKING:
    from penstock.consumers.distributed.watch import Watch
    from penstock.consumers.learning.ranks import Ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for a failed run, 2 for unusable input, 128 + signal."""
    arguments = _parser().parse_args(argv)
    # Environments, rewards and objectives may be the user's modules in the working directory.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.path += [path for path in os.environ.get(MODULES_PATH, "").split(os.pathsep) if path not in ("", *sys.path)]
    try:
        status = int(arguments.command(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `penstock try ... | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush would fail again
        return 128 + signal.SIGPIPE
    except ConfigError as error:
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
    from penstock.deploy.report.telemetry import TelemetryError
    from penstock.producers.interfaces import EngineError

    refused = parity.GateRefusedError
    return (PartDied, refused, ServerError, TelemetryError, EngineError, redis.ConnectionError, redis.TimeoutError)


class _Parser(argparse.ArgumentParser):
    """Suggests the command or option that a misspelt one resembles."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As in the base class, but the command that is given unknown options reports them."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options, known = (word.partition("=")[0] for word in unknown), self._option_string_actions
            similar = [guess for each in options for guess in difflib.get_close_matches(each, known, n=1)]
            meant = f"; did you mean {', '.join(similar)}?" if similar else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument \S+: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        similar = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1) if wrong else []
        super().error(f"{message}; did you mean {similar[0]}?" if similar else message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="penstock",
        description="Asynchronous RL post-training: vLLM producers, Redis streams, a correcting trainer.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {metadata.version('penstock')}")
    add_commands(parser, COMMANDS)
    return parser


def add_commands(parser: argparse.ArgumentParser, commands: Iterable[Command]) -> None:
    """Adds a subparser for each command; `dead list` goes below one for `dead`."""
    groups = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    for command in commands:
        group, _, name = command.name.rpartition(" ")
        if group not in groups:
            below = groups[""].add_parser(group, help=GROUPS[group], description=_sentence(GROUPS[group]))
            names = [other.name.split(" ")[1] for other in commands if other.name.startswith(f"{group} ")]
            groups[group] = below.add_subparsers(required=True, metavar="|".join(names))
        added = groups[group].add_parser(name, help=command.help, description=_sentence(command.help))
        command.add_arguments(added)
        added.set_defaults(command=command.run)


def _sentence(help: str) -> str:
    return help[0].upper() + help[1:] + "."


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_file(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run of this name from its last checkpoint")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the run file and print it with every default, then stop"
    )


def _add_try_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "given", metavar="RUN.toml|ENVIRONMENT", help="a run file, or an environment's import path (my_lab:Capitals)"
    )
    parser.add_argument("-n", type=int, default=4, metavar="N", help="training tasks to show (default: 4)")
    add_set(parser)


def _add_producer_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_file(parser, nargs="?")
    parser.set_defaults(runs=None)  # the default depends on --join
    parser.add_argument("--id", metavar="ID", help="name of this producer (default: host and process id)")
    parser.add_argument(
        "--join",
        metavar="REDIS_URL",
        help="in place of a run file: join the run that --run names in this Redis, from a host that shares no folder "
        "with it; without --runs, files go to the system's temporary folder",
    )
    parser.add_argument("--run", metavar="NAME", help="with --join: name of the run")
    parser.add_argument(
        "--model",
        metavar="PATH_OR_HF_NAME",
        help="with --join: the run's base model; by default the run's path if it is there, else from Redis",
    )


def _add_trainer_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run_file(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint, now")
    parser.add_argument(
        "--standby",
        action="store_true",
        help="wait until the run has had no trainer for trainer.lease_s, and continue it then",
    )


def _add_make_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--task",
        choices=("addition", "calculator"),
        default="addition",
        help="addition, as in the demo (the default), or an agent that may call a calculator",
    )
    parser.add_argument("--seed", type=int, help="of the initial weights and the warm start (default: 0)")
    add_set(parser, "another field of the recipe, as in num_layers=3", "NAME=VALUE")


def _add_run_file(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument(
        "run_file",
        type=Path,
        nargs=nargs,
        metavar="RUN.toml",
        help=f"a run file, or the name of one that is shipped: {', '.join(shipped_run_files())}",
    )
    parser.add_argument("--name", help="name of the run, in place of the run file's")
    add_runs(parser)
    add_set(parser)


def _load(arguments: argparse.Namespace, *, resume: bool = False) -> RunConfig:
    """Loads the configuration asked for; with `resume`, the run's own run file if there is one."""
    runs = arguments.runs or DEFAULT_RUNS
    return load_config(arguments.run_file, set=arguments.set, name=arguments.name, runs=runs, resume=resume)


def _run(arguments: argparse.Namespace) -> int:
    asked = _load(arguments, resume=arguments.resume)
    if arguments.dry_run:
        config = check(asked, runs=arguments.runs, resume=arguments.resume)
        print(resolved_toml(config), end="")
        print(f"penstock: all is well with {config.name}: it may be started without --dry-run", file=sys.stderr)
        return 0
    from penstock.deploy.launch.producer_pool import PartDied

    try:
        result = run(asked, runs=arguments.runs, resume=arguments.resume)
    except RunInterrupted as interrupted:
        print(f"penstock: stopped; to continue: {_resume_command(arguments, asked)}", file=sys.stderr)
        return 128 + interrupted.number
    except PartDied:
        print(f"penstock: to continue: {_resume_command(arguments, asked)}", file=sys.stderr)
        raise
    print_result(result)
    return 0


def _try(arguments: argparse.Namespace) -> int:
    config = trial_config(arguments.given, set=arguments.set)
    limit_threads(config.trainer.num_threads)
    return 0 if try_environment(config, arguments.n) else 1


def _resume_command(arguments: argparse.Namespace, config: RunConfig) -> str:
    command = ["penstock", "run", str(arguments.run_file), "--name", config.name]
    if arguments.runs != DEFAULT_RUNS:
        command += ["--runs", str(arguments.runs)]
    return shlex.join([*command, "--resume"])


def _producer(arguments: argparse.Namespace) -> int:
    if arguments.join is None:
        if arguments.run_file is None or arguments.run or arguments.model:
            raise ConfigError("producer: expected RUN.toml, or --join REDIS_URL --run NAME [--model PATH_OR_HF_NAME]")
        runs = arguments.runs or DEFAULT_RUNS
        config = _load(arguments)
        redis_url(config, runs)  # a missing URL is an error before anything heavy is imported
    else:
        if arguments.run_file is not None or arguments.run is None or arguments.name is not None:
            raise ConfigError("producer --join REDIS_URL: expected --run NAME, and neither RUN.toml nor --name")
        from penstock.deploy.launch.joining import RunEndedError, join, own_folder

        runs = arguments.runs or own_folder()
        try:
            config = join(arguments.join, arguments.run, model=arguments.model, overrides=arguments.set, runs=runs)
        except RunEndedError as ended:
            print(f"penstock: {ended}", file=sys.stderr)
            return 0
    limit_threads(config.producers.num_threads)
    from penstock.producers.__main__ import main as produce

    return int(produce(config, runs=runs, producer_id=arguments.id))


def _trainer(arguments: argparse.Namespace) -> int:
    signals = StopSignals()
    try:
        return _train(arguments, signals)
    except StoppedError as stopped:  # before the trainer's own module handles it
        return _fail(stopped, 0)
    finally:
        signals.ignore()


def _train(arguments: argparse.Namespace, signals: StopSignals) -> int:
    if arguments.resume and arguments.standby:
        raise ConfigError(
            "--resume --standby: expected one of them: --resume continues the run now, --standby once it has no trainer"
        )
    config = _load(arguments)
    if config.trainer.num_processes > 1 and "WORLD_SIZE" not in os.environ:
        return run_as_ranks(config.trainer.num_processes, signals.hand_to)
    limit_threads(config.trainer.num_threads)
    logs.configure("trainer", run=config.name, id=f"{socket.gethostname()}-{os.getpid()}")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return _lead(arguments, config, signals)
    from penstock.consumers.distributed.led_rank import follow
    from penstock.consumers.distributed.start import check_alike, join

    ranks, lookout = join(config)
    if not ranks.is_lead:
        signals.ignore()  # the lead stops in order, and then ends the other ranks
        return follow(config, ranks, lookout, lambda: redis_url(config, arguments.runs))
    status = 2
    try:
        check_alike(config, ranks)
        status = _lead(arguments, config, signals, ranks, lookout)
    except StoppedError:
        status = 0
        raise
    finally:
        lookout.ended(status)
    return status


def _lead(
    arguments: argparse.Namespace,
    config: RunConfig,
    signals: StopSignals,
    ranks: "Ranks | None" = None,
    lookout: "Watch | None" = None,
) -> int:
    from penstock.deploy.launch.start_checks import check, check_server

    place = f"Redis at {place_of(redis_url(config, arguments.runs))}"
    if None in config.num_evaluation_prompts.values():  # a run file that `penstock run` has not completed
        config = check(config).config
    from penstock.consumers.__main__ import main as train

    return train(
        config,
        runs=arguments.runs,
        resume=arguments.resume,
        standby=arguments.standby,
        signals=signals,
        check_server=lambda info: check_server(config, info, place),
        on_open=lambda: save_run_file(config, config.folder(arguments.runs)),  # other commands read it
        ranks=ranks,
        watch=lookout,
    )


def _make_model(arguments: argparse.Namespace) -> int:
    overrides = list(arguments.set) + ([] if arguments.seed is None else [f"seed={arguments.seed}"])
    try:
        fields = tomllib.loads("\n".join(overrides))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--set {' '.join(arguments.set)}: {error}; expected NAME=VALUE with a TOML value") from None
    # One thread: sums do not depend on the number of cores, and a model of this size is no faster with more.
    limit_threads(1)
    from penstock.deploy.demo.model_recipe import RECIPES, ModelRecipe, WarmStartError, find_model

    try:
        recipe = msgspec.convert(msgspec.structs.asdict(RECIPES[arguments.task]) | fields, ModelRecipe)
        if find_model(arguments.folder, recipe) is not None:
            return 0
        print(f"making the model of {arguments.folder}", flush=True)  # torch takes seconds to import
        from penstock.deploy.demo.make_model import make_model

        make_model(arguments.folder, recipe)
    except (msgspec.ValidationError, FileExistsError) as error:
        raise ConfigError(f"make-model: {error}") from None
    except WarmStartError as error:
        return _fail(error, 1)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    print_result(report(arguments.run, runs=arguments.runs))
    return 0


COMMANDS = (
    Command(
        "run", "start Redis, producers and trainer on this machine and follow them to the end", _add_run_arguments, _run
    ),
    Command("try", "show an environment's tasks, completions and rewards; trains nothing", _add_try_arguments, _try),
    evaluate.COMMAND,
    Command("producer", "run one producer of a run whose Redis is up (REDIS_URL)", _add_producer_arguments, _producer),
    Command("trainer", "run the trainer of a run whose Redis is up (REDIS_URL)", _add_trainer_arguments, _trainer),
    Command(
        "make-model", "make a small model to learn with and save it in FOLDER", _add_make_model_arguments, _make_model
    ),
    Command("report", "write summary.json and report.html of a run again", add_run, _report),
    *operate.COMMANDS,
    parity.COMMAND,
    prometheus.COMMAND,
    record.COMMAND,
    replay.COMMAND,
    watch.COMMAND,
    inspector.COMMAND,
)
GROUPS = {
    "dead": "list, show or requeue the dead letters of a run",
    "record": "export the record of a run's rollouts",
}


if __name__ == "__main__":
    sys.exit(main())
