"""`python -m bench.ablation`: runs the cells that are not finished, draws the figures, writes the tables into the page."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.schemas.config import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from bench.ablation.plan import AblationCell, AblationPlan
    from bench.ablation.results import AblationResult


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 once every cell asked for is finished, 1 for a cell that failed, 2 for unusable input."""
    arguments = _parser().parse_args(argv)
    try:
        return _ablate(arguments)
    except ConfigError as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ablation", description="Train one workload under several set-ups and compare."
    )
    parser.add_argument("file", type=Path, metavar="ABLATION.toml")
    parser.add_argument("--only", metavar="TEXT", default="", help="cells whose name contains TEXT")
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument("--present", action="store_true", help="figures and tables of what is finished; run nothing")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of all runs (default: %(default)s)"
    )
    return parser


def _ablate(arguments: argparse.Namespace) -> int:
    # Before torch is imported: equal thread counts make equal sums, in the warm start of a model too.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from penstock.deploy.demo.make_model import WarmStartError
    from rich.console import Console

    from bench.ablation.plan import load_plan
    from bench.ablation.runner import CellFailedError
    from bench.study.page import PageError
    from bench.study.results import ResultError

    console = Console(highlight=False)
    plan = load_plan(arguments.file)
    try:
        if not arguments.present:
            _run(plan, arguments, console)
        return _present(plan, console)
    except KeyboardInterrupt:
        console.print("ablation: stopped; finished cells are kept, the same command goes on with the rest")
        return 130
    except (ResultError, PageError) as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2
    except (CellFailedError, FileExistsError, WarmStartError) as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 1


def _run(plan: "AblationPlan", arguments: argparse.Namespace, console: "Console") -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from bench.ablation.plan import cell_config, cells
    from bench.ablation.results import write_result
    from bench.ablation.runner import run_cell

    gpu = has_gpu()
    wanted = [cell for cell in cells(plan, gpu=gpu) if arguments.only in cell.name]
    if not wanted:
        names = ", ".join(cell.name for cell in cells(plan, gpu=gpu))
        raise ConfigError(f"--only {arguments.only!r}: no such cell; expected a part of one of {names}")
    waiting = [cell for cell in wanted if arguments.fresh or not is_finished(plan, cell, gpu=gpu)]
    console.print(f"{len(wanted) - len(waiting)} of {len(wanted)} cells are finished")
    # Everything is read before the first hour is spent.
    lengths = {cell: cell_config(plan, cell, gpu=gpu).num_updates for cell in waiting}
    _make_models(plan, waiting, gpu, console.print)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("updates", total=sum(lengths.values()))
        done = 0
        for number, cell in enumerate(waiting, 1):
            progress.update(task, description=cell.name)

            def advance(updates: int, before: int = done) -> None:
                progress.update(task, completed=before + updates)

            result = run_cell(plan, cell, arguments.runs / plan.name, gpu=gpu, on_update=advance)
            write_result(result, plan.results)
            done += lengths[cell]
            progress.console.print(f"[{number}/{len(waiting)}] {describe(result)}", markup=False, soft_wrap=True)


def _present(plan: "AblationPlan", console: "Console") -> int:
    from bench.ablation.figures import draw_figures
    from bench.ablation.page import print_tables, write_page
    from bench.ablation.plan import cells
    from bench.study.results import ResultError

    results = finished(plan)
    missing = [cell.name for cell in cells(plan, gpu=False) if cell not in {result.cell for result in results}]
    if devices := sorted({result.settings["device"] for result in results})[1:]:
        raise ResultError(
            f"{plan.results}: cells of a cpu and of a {devices[0]} cannot be compared; expected all of one device"
        )
    if missing:
        console.print(f"not finished: {', '.join(missing)}; figures and page are left as they are")
        return 0
    files = [*draw_figures(plan, results), plan.page]
    write_page(plan, results)
    print_tables(plan, results, console)
    for file in files:
        console.print(f"wrote {file}")
    return 0


def finished(plan: "AblationPlan") -> "list[AblationResult]":
    """Results of every cell that there is one of, with the settings that it has now on the device it was run on.

    Raises:
        ResultError: a file that is no result.
    """
    from bench.ablation.plan import cells

    found = [_finished(plan, cell, gpu=gpu) for cell in cells(plan, gpu=True) for gpu in (False, True)]
    return [result for result in found if result is not None]


def is_finished(plan: "AblationPlan", cell: "AblationCell", *, gpu: bool) -> bool:
    """Whether there is a result of the settings that the cell has now. Raises ResultError."""
    return _finished(plan, cell, gpu=gpu) is not None


def _finished(plan: "AblationPlan", cell: "AblationCell", *, gpu: bool) -> "AblationResult | None":
    from bench.ablation.plan import settings
    from bench.ablation.results import read_result

    found = read_result(cell, plan.results)
    return found if found is not None and found.settings == settings(plan, cell, gpu=gpu) else None


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def describe(result: "AblationResult") -> str:
    first, last = result.accuracy[0][1], result.last_accuracy
    return (
        f"{result.cell.name}: accuracy {first:.3f} -> {last:.3f}, reward {result.at_the_end('reward'):.3f}, "
        f"kl_new_old {result.overall('kl_new_old'):.2e}, {result.wall_s:.0f} s"
    )


def _make_models(
    plan: "AblationPlan", waiting: "Sequence[AblationCell]", gpu: bool, say: Callable[[str], None]
) -> None:
    from penstock.deploy.demo.make_model import make_model

    from bench.ablation.plan import cell_config

    if plan.recipe is not None:
        for folder in {cell_config(plan, cell, gpu=gpu).model.path for cell in waiting}:
            make_model(folder, plan.recipe, progress=say)
