"""`penstock prometheus RUN`: the scrape configuration of a run on this machine."""

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path

from schemas.config import ConfigError

HERE = Path(__file__).parent
TEMPLATE = HERE / "one_machine.yml"
RULES = HERE / "rules"

Command = Callable[[argparse.Namespace], int]
AddCommand = Callable[
    ["argparse._SubParsersAction[argparse.ArgumentParser]", str, Command, str], argparse.ArgumentParser
]


def add_prometheus_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", add: AddCommand, default_runs: Path
) -> None:
    """Adds the command to the `penstock` parser; `add` makes it."""
    parser = add(
        commands,
        "prometheus",
        _prometheus,
        "write the Prometheus configuration of a run on this machine",
    )
    parser.add_argument("run", metavar="RUN", help="name of a run, or its folder")
    parser.add_argument(
        "--runs", type=Path, default=default_runs, metavar="DIR", help="folder of all runs (default: runs)"
    )


def write_prometheus_config(run_folder: Path) -> Path:
    """Writes `<run>/prometheus.yml`, which finds the run's processes by the files that they leave in `<run>/metrics/`.

    Raises:
        ConfigError: Prometheus cannot watch files in a folder of this name.
    """
    folder = run_folder.resolve()
    if "*" in str(folder):
        raise ConfigError(f"{folder}: Prometheus takes * for a pattern; expected a folder without it in its path")
    text = TEMPLATE.read_text()
    for name, path in (("RULES", RULES), ("RUN", folder)):
        text = text.replace(f'"{name}/', json.dumps(f"{path}/")[:-1])
    file = folder / "prometheus.yml"
    file.write_text(text)
    return file


def _prometheus(arguments: argparse.Namespace) -> int:
    from deploy.run_folder import RUN_FILE

    folders = (Path(arguments.run), arguments.runs / arguments.run)
    found = [folder for folder in folders if (folder / RUN_FILE).is_file()]
    if not found:
        raise ConfigError(f"{arguments.run}: neither a run's folder nor a run in {arguments.runs}")
    file = write_prometheus_config(found[0])
    data = file.parent / "prometheus"
    print(f"wrote {file}; with Prometheus installed:\n")
    print(shlex.join(["prometheus", f"--config.file={file}", f"--storage.tsdb.path={data}"]))
    return 0
