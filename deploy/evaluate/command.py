"""The command `penstock evaluate`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.deploy.evaluate.aside import evaluate_aside
from penstock.deploy.launch.command_line import Command, add_json, add_runs, add_set, find_run_file, standard_output
from penstock.schemas.config import load_config
from penstock.schemas.metrics import REWARD, error_key, pass_key

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.deploy.evaluate.evaluation import Evaluated


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL|RUN", help="a model's folder, or a run (its name or folder): its newest checkpoint"
    )
    parser.add_argument(
        "run_file", type=Path, metavar="RUN.toml", help="a run file: whose held-out prompts, and how they are answered"
    )
    add_runs(parser)
    add_json(parser, "print the results as JSON for a machine")
    add_set(parser, "override a field, as in evaluation.num_samples=8")


def _evaluate(arguments: argparse.Namespace) -> int:
    """Status 0; 1 if prompts have failed."""
    config = load_config(find_run_file(arguments.run_file), arguments.set)
    found = evaluate_aside(arguments.model, config, runs=arguments.runs)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        standard_output().print(results_table(found))
    return 1 if found.failures else 0


def results_table(found: "Evaluated") -> "Table":
    """One column a set; figures with their standard errors."""
    from rich import box
    from rich.table import Table

    keys = {key for each in found.sets for key in each.figures}
    passes = sorted(k for k in {int(key[5:]) for key in keys if key.removeprefix("pass@").isdigit()})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("set", no_wrap=True)
    for each in found.sets:
        table.add_column(each.name, justify="right", overflow="fold")
    table.add_row("prompts", *(f"{each.num_prompts:,}" for each in found.sets))
    table.add_row("samples", *(f"{each.num_samples:,}" for each in found.sets))
    for label, key in (("avg@k", REWARD), *((pass_key(k), pass_key(k)) for k in passes)):
        table.add_row(label, *(_figure(each.figures, key) for each in found.sets))
    for label, key, style in (("length", "completion_tokens", ",.1f"), ("truncated", "truncated_frac", ".1%")):
        figures = (each.figures.get(key) for each in found.sets)
        table.add_row(label, *("-" if figure is None else format(figure, style) for figure in figures))
    return table


def _figure(figures: dict[str, float], key: str) -> str:
    """`0.512 ± 0.020`."""
    if key not in figures:
        return "-"
    error = figures.get(error_key(key))
    return f"{figures[key]:.3f}" + ("" if error is None else f" ± {error:.3f}")


COMMAND = Command(
    "evaluate", "measure a model on the held-out prompts of a run file; trains nothing", _add_arguments, _evaluate
)
