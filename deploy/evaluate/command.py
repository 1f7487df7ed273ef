"""The command `penstock evaluate`."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from penstock.deploy.launch.command_line import (
    DEFAULT_RUNS,
    Json,
    RunFile,
    Runs,
    Set,
    find_run_file,
    limit_threads,
    print_result,
)
from penstock.deploy.launch.engine_output import output_in, progress
from penstock.deploy.operate.printing import print_block, print_table
from penstock.producers.interfaces import EngineError
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.metrics import REWARD, error_key, pass_key

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.deploy.evaluate.evaluation import Evaluated


def command(
    model: Annotated[str, Parameter(help="a model's folder, or a run (its name or folder): its newest checkpoint")],
    run_file: RunFile,
    /,
    *,
    runs: Runs = DEFAULT_RUNS,
    json: Json = False,
    set: Set = (),
    show: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
) -> int:
    """Measure a model on the held-out prompts of a run file; trains nothing. Status 1 if prompts have failed.

    Args:
        show: prompts of each set to print with an answer
    """
    evaluated = evaluate_model(model, load_config(find_run_file(run_file), set), runs=runs, show=show)
    print_result(evaluated, _print, json)
    return 1 if evaluated.failures else 0


def _print(evaluated: "Evaluated") -> None:
    print_table(results_table(evaluated))
    for each in evaluated.sets:
        for n, answer in enumerate(each.shown, 1):
            print(f"\n{each.name}, held-out prompt {n}: reward {answer.reward:g}")
            for label, text in (("prompt", answer.prompt), ("gold", answer.gold), ("answer", answer.answer)):
                print_block(label, text)


def evaluate_model(
    model: str | Path, settings: RunConfig, *, runs: str | Path = DEFAULT_RUNS, show: int = 0
) -> "Evaluated":
    """Evaluates as `penstock.deploy.running.evaluate` does, with progress on stderr and other output in a file."""
    limit_threads(settings.producers.num_threads)
    from penstock.deploy.evaluate.evaluation import evaluate  # imports torch

    say = progress(True)
    log = Path(tempfile.mkstemp(prefix="penstock-evaluate-", suffix=".log")[1])
    is_wanted = False
    try:
        with output_in(log):
            found = evaluate(model, settings, runs=runs, say=say, show=show)
        is_wanted = bool(found.failures)
    except EngineError as error:
        is_wanted = True
        raise EngineError(f"{error} ({log} holds what the engine printed)") from error
    finally:
        if not is_wanted:
            log.unlink()
    for reason, count in found.failures.items():
        say(f"{count} of {sum(each.num_prompts for each in found.sets)} prompts failed, each counts as 0: {reason}")
    if found.failures:
        say(f"{log} has more")
    return found


def results_table(found: "Evaluated") -> "Table":
    """Returns a table with a column per set; figures with their standard errors."""
    from rich import box
    from rich.table import Table

    keys = {key for each in found.sets for key in each.figures}
    passes = sorted({int(key[5:]) for key in keys if key.removeprefix("pass@").isdigit()})
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
    """Returns a figure as in `0.512 ± 0.020`."""
    if key not in figures:
        return "-"
    error = figures.get(error_key(key))
    return f"{figures[key]:.3f}" + ("" if error is None else f" ± {error:.3f}")
