"""What figures share: colours, series and axes."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from penstock.deploy.report.lines import Update
from penstock.deploy.report.telemetry import RunTelemetry

INK, MUTED, RULE, GRID = "#1f2937", "#6b7280", "#9ca3af", "#e5e7eb"
BLUE, TEAL, AMBER, RED, VIOLET = "#2563eb", "#0d9488", "#d97706", "#dc2626", "#7c3aed"
SERIES = (BLUE, TEAL, AMBER, VIOLET, "#db2777", "#65a30d", "#0891b2", "#92400e")
LAG_SHADES = ("#dbeafe", "#a5c8fd", "#6fa3f8", "#3b7ae8", "#2257c0", "#183d8a", "#0f2657")
LAG_COLOURS = ("#0d9488", "#65a30d", "#2563eb", "#7c3aed", "#db2777", "#92400e")
"""One for each of `penstock.schemas.metrics.LAG_LABELS`, cold to warm."""
MASKED_SHADE = "#ef4444"
MAX_POINTS = 600
"""Longer lines are averaged in bins, which keeps the page small."""
SMOOTHING = 0.04
"""Width of the running mean, as a share of the line."""


class FigureSpec(NamedTuple):
    """A figure of the report.

    draw: fills `num_axes` axes, one below the other, and returns False if there is nothing to draw; the report then
        leaves the figure out.
    """

    name: str
    title: str
    caption: str
    draw: Callable[..., bool]
    num_axes: int = 1
    height_in: float = 3.1


def figure(title: str, caption: str, **options: Any) -> Callable[[Callable[..., bool]], FigureSpec]:
    """Makes a figure of the function that draws it, under that function's name."""

    def make(draw: Callable[..., bool]) -> FigureSpec:
        num_axes = len(signature(draw).parameters) - 1
        return FigureSpec(draw.__name__.replace("_", "-"), title, caption, draw, num_axes, **options)

    return make


class Curves(NamedTuple):
    """Metrics by update on one of a figure's axes. series: metric, colour and label of each."""

    ylabel: str
    series: Sequence[tuple[str, str, str]]
    from_zero: bool = False
    percent: bool = False


def curves_figure(name: str, title: str, caption: str, *parts: Curves, height_in: float = 3.1) -> FigureSpec:
    """Returns a figure of metrics by update, with one of `parts` on each of its axes."""

    def draw(telemetry: RunTelemetry, *axes: Axes) -> bool:
        drawn = [by_update(telemetry, ax, part.series, part.ylabel) for ax, part in zip(axes, parts, strict=True)]
        for ax, part in zip(axes, parts, strict=True):
            if part.percent:
                in_percent(ax)
            if part.from_zero:
                ax.set_ylim(bottom=0, top=max(ax.get_ylim()[1], 0.01) if part.percent else None)
        for ax in axes[:-1]:
            ax.set_xlabel("")
        return any(drawn)

    return FigureSpec(name, title, caption, draw, len(parts), height_in)


def binned(x: Sequence[float] | np.ndarray, *columns: Sequence[float] | np.ndarray) -> list[np.ndarray]:
    """`x` and the columns, each `[n]`, as means over equal bins, NaN left out: `[min(n, MAX_POINTS)]` each."""
    arrays = [np.asarray(column, dtype=float) for column in (x, *columns)]
    num_points = len(arrays[0])
    if num_points <= MAX_POINTS:
        return arrays
    starts = np.linspace(0, num_points, MAX_POINTS, endpoint=False).astype(int)
    means = []
    for array in arrays:
        known = ~np.isnan(array)
        sums, counts = (np.add.reduceat(values, starts, dtype=float) for values in (np.where(known, array, 0.0), known))
        means.append(np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0))
    return means


def running_mean(values: np.ndarray) -> np.ndarray:
    """Centred mean over SMOOTHING of the values, NaN left out; the window shrinks at both ends."""
    half = max(1, round(len(values) * SMOOTHING / 2))
    valid = np.isfinite(values)
    totals = np.concatenate(([0.0], np.cumsum(np.where(valid, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(valid)))
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (totals[high] - totals[low]) / (counts[high] - counts[low])


def column(updates: Sequence[Update], name: str) -> np.ndarray:
    """Returns a field or metric of every update as floats `[n]`, NaN without a value."""
    is_field = name in Update.__struct_fields__
    values = [getattr(line, name) if is_field else line.metrics.get(name) for line in updates]
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def numbers(updates: Sequence[Update]) -> np.ndarray:
    """Returns the numbers of updates as floats `[n]`."""
    return np.array([line.update for line in updates], dtype=float)


def noisy_line(ax: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str) -> bool:
    """Draws a noisy series in a light tone, with its running mean on top."""
    if not np.isfinite(y).any():
        return False
    x, y = binned(x, y)
    ax.plot(x, y, color=colour, alpha=0.28, linewidth=1.0)
    ax.plot(x, running_mean(y), color=colour, label=label)
    return True


def by_update(telemetry: RunTelemetry, ax: Axes, series: Sequence[tuple[str, str, str]], ylabel: str) -> bool:
    """Draws metrics by update; series: metric, colour and label of each. Returns whether any has a value."""
    x = numbers(telemetry.updates)
    drawn = [noisy_line(ax, x, column(telemetry.updates, name), colour, label) for name, colour, label in series]
    ax.set_xlabel("update")
    ax.set_ylabel(ylabel)
    if sum(drawn) > 1:
        legend_above(ax)
    return any(drawn)


def in_percent(ax: Axes) -> None:
    """Labels the y axis, of shares, with up to four digits of a percentage."""
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.4g} %"))


def legend_above(ax: Axes, columns: int = 4) -> None:
    """Places the legend above the axes, where no line crosses it."""
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.4,
    )


def time_axis(ax: Axes, last_s: float) -> float:
    """Labels the x axis in a unit that fits and returns seconds per unit."""
    unit, label = (3600, "hours") if last_s >= 4 * 3600 else (60, "minutes") if last_s >= 600 else (1, "seconds")
    ax.set_xlabel(f"{label} since the first prompt")
    return unit


def since_start(telemetry: RunTelemetry, times: Sequence[float] | np.ndarray) -> np.ndarray:
    """Seconds since the run's first prompt."""
    return np.asarray(times, dtype=float) - (telemetry.start_s or 0.0)
