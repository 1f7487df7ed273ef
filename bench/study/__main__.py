"""`make study`: trains the cells that are not finished; writes the tables and the picture of docs/corrections.md."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Before torch is imported: equal thread counts make equal sums, in the warm start of a model too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.study.cells import every_cell, grid, read_results, settings, write_results
from bench.study.loop import run_cell
from bench.study.page import present
from penstock.deploy.demo.make_model import WarmStartError, make_model
from penstock.schemas.config import ConfigError

MODELS = Path("runs") / "models"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 once every chosen cell is finished, 1 if a model cannot be made, 2 for unusable input,
    130 when stopped; the same command then continues with the rest."""
    parser = argparse.ArgumentParser(prog="python -m bench.study", description="Train the study's cells, compare them.")
    parser.add_argument("--only", metavar="TEXT", default="", help="cells whose name contains TEXT")
    parser.add_argument("--present", action="store_true", help="tables and picture of what is finished; train nothing")
    arguments = parser.parse_args(argv)
    try:
        if not arguments.present:
            train(arguments.only)
        missing = [cell.name for cell in every_cell() if cell not in read_results()]
        if missing:
            print(f"not finished, {len(missing)} cells: {', '.join(missing)}")
        if read_results().keys() >= set(grid()):
            present(read_results())
        else:
            print("the page is left as it is")
    except KeyboardInterrupt:
        print("study: stopped; finished cells are kept, the same command continues with the rest")
        return 130
    except ConfigError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except (FileExistsError, WarmStartError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 1
    return 0


def train(only: str) -> None:
    """Trains every cell of that name that has no result with its present settings."""
    results = read_results()
    configs = {cell: cell.config(MODELS) for cell in every_cell() if only in cell.name}
    if not configs:
        raise ConfigError(
            f"--only {only!r}: no such cell; expected a part of one of {', '.join(c.name for c in every_cell())}"
        )
    waiting = [
        cell
        for cell, config in configs.items()
        if cell not in results or results[cell].settings != settings(cell, config)
    ]
    print(f"{len(configs) - len(waiting)} of {len(configs)} cells are finished", flush=True)
    for number, cell in enumerate(waiting, 1):
        make_model(Path(configs[cell].model.path), cell.recipe, progress=print)
        results[cell] = result = run_cell(cell, configs[cell])
        write_results(results)
        accuracy = (
            f"accuracy {result.accuracy[0][1]:.3f} -> {result.last_accuracy:.3f}, mean {result.mean_accuracy:.3f}"
        )
        print(
            f"[{number}/{len(waiting)}] {cell.name}: {accuracy}, ESS {result.mean_ess:.3f}, {result.wall_s} s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
