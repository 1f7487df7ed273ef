"""`make study`: runs the cells that are not finished, draws the figures, writes the tables into the page."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported: equal thread counts make equal sums.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from penstock.deploy.demo.make_model import WarmStartError, make_model
from penstock.schemas.config import ConfigError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.study.cells import MODELS, NUM_UPDATES, StudyCell, grid, settings
from bench.study.figures import draw_curves
from bench.study.loop import run_cell
from bench.study.page import PAGE, PageError, print_tables, write_page
from bench.study.pictures import draw_pictures
from bench.study.results import RESULTS, ResultError, StudyResult, read_result, write_result


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 once every cell asked for is finished; 130 when stopped, and the same command goes on."""
    arguments = _parser().parse_args(argv)
    console = Console(highlight=False)
    try:
        if arguments.command == "run":
            _run(arguments, console)
        return _present(arguments, console)
    except KeyboardInterrupt:
        console.print("study: stopped; finished cells are kept, the same command goes on with the rest")
        return 130
    except (ConfigError, ResultError, PageError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except (FileExistsError, WarmStartError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.study", description="Train at a forced lag with each correction, and compare."
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "figures"),
        default="run",
        help="run: what is not finished, then figures; figures: figures and tables alone (default: %(default)s)",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="cells whose name contains TEXT")
    parser.add_argument("--updates", type=int, metavar="N", default=NUM_UPDATES, help="default: %(default)s")
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument("--results", type=Path, metavar="DIR", default=RESULTS, help="default: that of the repository")
    parser.add_argument("--page", type=Path, metavar="FILE.md", default=PAGE, help="default: that of the repository")
    parser.add_argument("--models", type=Path, metavar="DIR", default=MODELS, help="default: %(default)s")
    return parser


def _run(arguments: argparse.Namespace, console: Console) -> None:
    cells = [cell for cell in grid() if arguments.only in cell.name]
    if not cells:
        raise ConfigError(f"--only {arguments.only!r}: no such cell; expected a part of one of {_names(grid())}")
    if arguments.updates < 1:
        raise ConfigError(f"--updates {arguments.updates}: expected 1 or more")
    waiting = [cell for cell in cells if arguments.fresh or not _is_finished(cell, arguments)]
    console.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished")
    for folder, recipe in {cell.model_folder(arguments.models): cell.recipe for cell in waiting}.items():
        make_model(folder, recipe, progress=console.print)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("updates", total=len(waiting) * arguments.updates)
        for number, cell in enumerate(waiting, 1):
            progress.update(task, description=cell.name)
            began_s = time.perf_counter()
            result = run_cell(cell, cell.config(arguments.models, arguments.updates), lambda _: progress.advance(task))
            result.wall_s = time.perf_counter() - began_s
            write_result(result, arguments.results)
            progress.console.print(f"[{number}/{len(waiting)}] {_line(result)}", markup=False, soft_wrap=True)


def _present(arguments: argparse.Namespace, console: Console) -> int:
    folder = arguments.page.parent
    results = [found for cell in grid() if (found := read_result(cell, arguments.results)) is not None]
    files = draw_pictures(folder)
    missing = len(grid()) - len(results)
    if missing:
        console.print(f"{missing} cells are not finished: the figures of the study and its tables are left as they are")
    else:
        files += draw_curves(results, folder)
        write_page(results, arguments.page)
        files.append(arguments.page)
        print_tables(results, console)
    for file in files:
        console.print(f"wrote {file}")
    return 0


def _is_finished(cell: StudyCell, arguments: argparse.Namespace) -> bool:
    found = read_result(cell, arguments.results)
    wanted = settings(cell, cell.config(arguments.models, arguments.updates))
    return found is not None and found.settings == wanted


def _line(result: StudyResult) -> str:
    first, last = result.accuracy[0][1], result.last_accuracy
    skipped = f", {sum(result.skipped.values())} updates skipped" if result.skipped else ""
    return (
        f"{result.cell.name}: accuracy {first:.3f} -> {last:.3f}, mean {result.mean_accuracy:.3f}, "
        f"ESS {result.mean_ess:.3f}{skipped}, {result.wall_s:.1f} s"
    )


def _names(cells: Sequence[StudyCell]) -> str:
    return ", ".join(cell.name for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
