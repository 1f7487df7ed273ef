"""`penstock watch RUN`: shows three views of a run in the terminal."""

import argparse
from pathlib import Path

from penstock.deploy.launch.command_line import Command, add_run
from penstock.schemas.config import ConfigError, RunConfig


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "name of a run, its folder, or its run file if Redis is elsewhere")
    parser.add_argument("--once", action="store_true", help="print all three views once, as without a terminal")
    parser.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a metrics endpoint that the run's folder does not name, such as that of a trainer on another machine",
    )


def _watch(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from penstock.deploy.watch.gathering import Gatherer
    from penstock.deploy.watch.screen import all_views, watch

    name, folder, config = find(arguments.run, arguments.runs)
    gatherer = Gatherer(name, folder, config, [_address(text) for text in arguments.metrics])
    if config is None:
        _check_is_there(name, arguments.runs)
    console = Console()
    if arguments.once or not console.is_terminal or console.is_dumb_terminal:
        console.print(all_views(gatherer.gather(), console.width))
        return 0
    watch(gatherer, console)
    return 0


def find(run: str, runs: Path) -> tuple[str, Path | None, RunConfig | None]:
    """Finds a run as `find_run` does, or by its run file if the run is on other machines.

    Raises:
        ConfigError: no such run, or a run file that cannot be read.
    """
    from penstock.deploy.operate.run_access import find_run
    from penstock.schemas.config import load_config

    if not Path(run).is_file():
        return find_run(run, runs)
    config = load_config(Path(run))
    folder = config.folder(runs)
    return config.name, folder if folder.is_dir() else None, config


def _check_is_there(name: str, runs: Path) -> None:
    """Raises ConfigError if Redis holds no run of this name, ServerError if Redis cannot be reached."""
    from penstock.deploy.operate.run_access import open_run

    with open_run(name, runs) as run:
        run.redis.ping()


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or "/" in text:
        raise ConfigError(f"--metrics {text}: expected HOST:PORT")
    return text


COMMAND = Command(
    "watch", "show a run in three views: flow, learning, off-policy (keys 1, 2, 3; q quits)", _add_arguments, _watch
)
