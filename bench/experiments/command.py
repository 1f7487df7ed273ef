"""`python -m bench.experiments`: trains the cells that are not finished, draws the figures, writes the tables."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.ablation.experiment import PLANS, Ablation
from bench.experiments.experiment import CellFailedError, CellResult, Experiment, ResultError, write_result
from bench.experiments.page import PageError, write_part
from bench.study.experiment import Study
from penstock.deploy.demo.make_model import WarmStartError, make_model
from penstock.schemas.config import ConfigError

RUNS = Path("runs")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 once every chosen cell is finished, 1 for a cell that failed, 2 for unusable input,
    130 when stopped; the same command then continues with the rest."""
    arguments = _parser().parse_args(argv)
    try:
        experiment = open_experiment(arguments.experiment, arguments.runs)
        return run(experiment, only=arguments.only, fresh=arguments.fresh, present_only=arguments.present)
    except KeyboardInterrupt:
        print("experiments: stopped; finished cells are kept, the same command continues with the rest")
        return 130
    except (ConfigError, ResultError, PageError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    except (CellFailedError, FileExistsError, WarmStartError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.experiments", description="Train an experiment's cells and compare them."
    )
    names = ", ".join(["study", *PLANS])
    parser.add_argument("experiment", metavar="EXPERIMENT", help=f"{names}, or the TOML file of an ablation")
    parser.add_argument("--only", metavar="TEXT", default="", help="cells whose name contains TEXT")
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument("--present", action="store_true", help="figures and tables of what is finished; run nothing")
    parser.add_argument(
        "--runs", type=Path, default=RUNS, metavar="DIR", help="folder of all runs (default: %(default)s)"
    )
    return parser


def open_experiment(name: str, runs: Path) -> Experiment[Any, Any]:
    """Returns the experiment of that name, or the ablation that the file of that name describes. Raises ConfigError."""
    return Study(runs) if name == "study" else Ablation.load(PLANS.get(name, Path(name)), runs)


def run(experiment: Experiment[Any, Any], *, only: str = "", fresh: bool = False, present_only: bool = False) -> int:
    """Trains what is not finished and presents what is.

    Raises:
        ConfigError, ResultError, PageError, CellFailedError, FileExistsError, WarmStartError: see `main`.
    """
    console = Console(highlight=False)
    if not present_only:
        _train(experiment, only, fresh, console)
    _present(experiment, console)
    return 0


def has_gpu() -> bool:
    return torch.cuda.is_available()


def _train(experiment: Experiment[Any, Any], only: str, fresh: bool, console: Console) -> None:
    gpu = has_gpu()
    cells = experiment.cells(gpu=gpu)
    wanted = [cell for cell in cells if only in cell.name]
    if not wanted:
        names = ", ".join(cell.name for cell in cells)
        raise ConfigError(f"--only {only!r}: no such cell; expected a part of one of {names}")
    waiting = [cell for cell in wanted if fresh or not experiment.is_finished(cell, gpu=gpu)]
    console.print(f"{len(wanted) - len(waiting)} of {len(wanted)} cells are finished")
    # Everything is read before the first hour is spent.
    configs = {cell: experiment.config(cell, gpu=gpu) for cell in waiting}
    for folder, recipe in {configs[cell].model.path: experiment.recipe(cell) for cell in waiting}.items():
        if recipe is not None:
            make_model(folder, recipe, progress=console.print)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("updates", total=sum(config.num_updates for config in configs.values()))
        done = 0
        for number, (cell, config) in enumerate(configs.items(), 1):
            progress.update(task, description=cell.name)

            def advance(updates: int, before: int = done) -> None:
                progress.update(task, completed=before + updates)

            began_s = time.monotonic()
            result = experiment.run(cell, gpu=gpu, on_update=advance)
            result.wall_s = time.monotonic() - began_s
            write_result(result, experiment.results)
            done += config.num_updates
            progress.console.print(f"[{number}/{len(waiting)}] {describe(result)}", markup=False, soft_wrap=True)


def describe(result: CellResult) -> str:
    first = result.accuracy[0][1]
    accuracy = f"accuracy {first:.3f} -> {result.last_accuracy:.3f}"
    return ", ".join([f"{result.cell.name}: {accuracy}", result.summary, f"{result.wall_s:.1f} s"])


def _present(experiment: Experiment[Any, Any], console: Console) -> None:
    results = experiment.finished()
    finished = {result.cell for result in results}
    missing = [cell.name for cell in experiment.cells(gpu=False) if cell not in finished]
    devices = sorted({result.settings.get("device", "cpu") for result in results})
    if devices[1:]:
        raise ResultError(
            f"{experiment.results}: cells of a {' and of a '.join(devices)} cannot be compared; "
            "expected all of one device"
        )
    if missing:
        console.print(f"not finished: {', '.join(missing)}; figures and page are left as they are")
        return
    tables = experiment.tables(results)
    files = [*experiment.draw(results), experiment.page]
    write_part(experiment.page, experiment.name, tables)
    console.print(tables, markup=False, soft_wrap=True)
    for file in files:
        console.print(f"wrote {file}")
