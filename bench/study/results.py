"""What a cell found, and the JSON file that keeps it."""

import math
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec

from bench.study.cells import StudyCell

R = TypeVar("R", bound=msgspec.Struct)

RESULTS = Path(__file__).parent / "results"
DIGITS = 5
"""Significant digits kept of a curve's values."""
LAST_EVALUATIONS = 5
"""Evaluations that the accuracy at the end is the mean of."""


class ResultError(ValueError):
    """A result file that cannot be read; the message names it."""


class StudyResult(msgspec.Struct, kw_only=True):
    """One finished cell.

    settings: what decided the outcome (`cells.settings`).
    curves: by metric, a value an update: lag, reward (of the lagging policy that sampled), and the learner's metrics;
        None where an update had no such metric.
    accuracy: (updates done, held-out greedy accuracy of the policy then).
    skipped: updates without an optimizer step, by reason.
    """

    cell: StudyCell
    date: str
    """UTC, ISO 8601, of the start."""
    packages: dict[str, str]
    settings: dict[str, Any]
    curves: dict[str, list[float | None]]
    accuracy: list[tuple[int, float]]
    skipped: dict[str, int]
    wall_s: float = 0.0

    @classmethod
    def begin(cls, cell: StudyCell, settings: dict[str, Any]) -> "StudyResult":
        return cls(
            cell=cell,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            packages={name: version(name) for name in ("torch", "transformers")},
            settings=settings,
            curves={},
            accuracy=[],
            skipped={},
        )

    @property
    def mean_accuracy(self) -> float:
        """Over the evaluations after the start: the area under the curve, high for fast and for steady learning."""
        return fmean(value for update, value in self.accuracy if update)

    @property
    def last_accuracy(self) -> float:
        return fmean(value for _, value in self.accuracy[-LAST_EVALUATIONS:])

    @property
    def mean_ess(self) -> float:
        values = [value for value in self.curves["ess_fraction"] if value is not None]
        return fmean(values) if values else math.nan


def write_result(result: StudyResult, folder: Path) -> Path:
    """Writes `<cell>.json`: whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result.cell.name}.json"
    curves = {name: [rounded_value(value) for value in values] for name, values in result.curves.items()}
    rounded = msgspec.structs.replace(result, curves=curves, wall_s=round(result.wall_s, 1))
    write_whole(file, msgspec.json.encode(rounded) + b"\n")
    return file


def write_whole(file: Path, data: bytes) -> None:
    """Writes the file, whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(file)


def read_result(cell: StudyCell, folder: Path) -> StudyResult | None:
    """The cell's result; None where it has none.

    Raises:
        ResultError: a file that is no such result.
    """
    return read_cell_result(cell, folder, StudyResult, "the study")


def read_cell_result(cell: Any, folder: Path, kind: type[R], whose: str) -> R | None:
    """The result, of type `kind`, that `<cell>.json` holds; None where there is no such file.

    Args:
        cell: what the result's own `cell` must be. It has a `name`.
        whose: as in "the study", for an error.

    Raises:
        ResultError: a file that is no such result.
    """
    file = folder / f"{cell.name}.json"
    try:
        result: Any = msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ResultError(f"{file}: no result of {whose}: {error}; remove it to run the cell again") from None
    if result.cell != cell:
        raise ResultError(f"{file}: holds the cell {result.cell.name}; remove it to run the cell again")
    return result


def rounded_value(value: float | None) -> float | None:
    """To `DIGITS` significant digits; None for what is not finite."""
    # msgspec would write a NaN or infinity of a failed step as null as well; this says so.
    return float(f"{value:.{DIGITS}g}") if value is not None and math.isfinite(value) else None
