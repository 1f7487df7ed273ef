"""Reads a run's results: its report, and its numbers by update and by evaluation."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.launch.run_folder import find_run_folder
from penstock.deploy.operate.printing import print_table
from penstock.deploy.report.lines import TelemetryError, row_of
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.best import BEST_FOLDER, read_best


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The results in a run's folder.

    model: folder of the final model in Hugging Face's format, None until the run is complete. best: folder of the model
    of the best evaluation, None without `checkpoint.best`. report: `report.html`.
    summary: the content of `summary.json`; an unknown figure is None.
    """

    name: str
    folder: Path
    model: Path | None
    best: Path | None
    report: Path
    summary: dict[str, Any] = field(repr=False)


def report(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> RunResult:
    """Writes `summary.json` and `report.html` of the run of this name in `runs`, or in the folder `run`; the run may be
    in progress.

    Raises:
        ConfigError: no such run, or its `run.toml` is no run file.
        TelemetryError: a malformed line (named with its file and number), or a file that cannot be read or written.
    """
    from penstock.deploy.report.report import write_report  # imports matplotlib

    folder = find_run_folder(run, runs)
    try:
        summary, page = write_report(folder)
    except OSError as error:
        raise TelemetryError(f"no report of {folder}: {error}") from error
    model, best = folder / "model", folder / BEST_FOLDER
    return RunResult(
        name=summary["name"],
        folder=folder,
        model=model if model.is_dir() else None,
        best=best if best.is_dir() else None,
        report=page,
        summary=summary,
    )


def load_updates(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> list[dict[str, Any]]:
    """Reads the numbers of every update, in order: a row each, with the names of `updates.jsonl`. Leaves out updates
    that a rollback undid. A number that an update does not have is not in its row.

    Raises:
        ConfigError: no such run, or its `run.toml` is no run file.
        TelemetryError: a malformed line (named with its file and number).
    """
    return [row_of(line) for line in read_telemetry(find_run_folder(run, runs)).updates]


def load_evaluations(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> list[dict[str, Any]]:
    """Reads the figures of every evaluation, in order: a row each, with the names of `evaluations.jsonl`: `reward`,
    `pass@8`, `reward/exact` of a part `exact`, and so on. `update` is the one that made the policy. Leaves out
    evaluations that a rollback undid.

    Raises:
        ConfigError: no such run, or its `run.toml` is no run file.
        TelemetryError: a malformed line (named with its file and number).
    """
    return [row_of(line) for line in read_telemetry(find_run_folder(run, runs)).evaluations]


def print_result(result: RunResult) -> None:
    """Prints the figures of a run, warnings, and the places of its files."""
    from penstock.deploy.report.summary_table import summary_table, warnings_of

    print_table(summary_table(result.summary), at_most=80)
    for warning in warnings_of(result.summary):
        print(f"penstock: warning: {warning}", file=sys.stderr)
    if result.model is not None:
        print(f"model    {result.model}")
    if result.best is not None and (found := read_best(result.best)) is not None:
        print(f"best     {result.best}  ({found.figure} {found.value:.4f}, after update {found.update})")
    print(f"summary  {result.folder / 'summary.json'}\nreport   {result.report}\nlogs     {result.folder / 'logs'}")
