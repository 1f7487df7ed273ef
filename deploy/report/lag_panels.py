"""Figures of the mismatch by lag, with a line or a point for each of `penstock.schemas.metrics.LAG_LABELS`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from penstock.deploy.report.drawing import (
    AMBER,
    BLUE,
    LAG_COLOURS,
    FigureSpec,
    binned,
    column,
    figure,
    legend_above,
    numbers,
    running_mean,
)
from penstock.deploy.report.means import mismatch_by_lag
from penstock.deploy.report.telemetry import RunTelemetry
from penstock.schemas.metrics import LAG_LABELS, UPDATE_METRICS, lag_key, title_of


@figure(
    "Mismatch against lag",
    "The point at 0, of rows that met no update, is the gap between engine and trainer; what rises from there is "
    "drift, which a smaller lag or a correction keeps out of the gradient. 0-mixed: tokens of lag 0 in rows that began "
    "under older weights, whose keys and values they saw.",
)
def mismatch_against_lag(telemetry: RunTelemetry, ax: Axes) -> bool:
    """Draws means over the whole run, a point for each lag bucket above 0 on a logarithmic axis."""
    found = mismatch_by_lag(telemetry.updates)
    drawn: list[float] = []
    for name, colour, label, marker in (("k3_kl", BLUE, "k3 KL (nats per token)", "o"), ("chi2", AMBER, "χ²", "s")):
        points = {i: found.get(label_, {}).get(name, 0.0) for i, label_ in enumerate(LAG_LABELS)}
        above = {i: value for i, value in points.items() if value > 0}
        if above:
            ax.plot(list(above), list(above.values()), color=colour, marker=marker, markersize=5, label=label)
            drawn += above.values()
    if drawn:
        ax.set_yscale("log")
        # From a power of ten to another: however little the points differ, there are two ticks to read them by.
        low, high = math.floor(math.log10(min(drawn))), math.floor(math.log10(max(drawn))) + 1
        ax.set_ylim(10.0**low, 10.0**high)
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high - low < 3 else (1.0,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        legend_above(ax)
    ax.set_xticks(range(len(LAG_LABELS)), LAG_LABELS)
    ax.set_xlim(-0.4, len(LAG_LABELS) - 0.6)
    ax.set_xlabel("lag (optimizer steps between sampling and training)")
    ax.set_ylabel("mean over the run's tokens")
    return bool(drawn)


class LagCurves(NamedTuple):
    """A metric by update on one of a figure's axes, with a line for each lag. setup: called on the axes when drawn."""

    metric: str
    setup: Callable[[Axes], None] = lambda ax: None

    @property
    def ylabel(self) -> str:
        unit = UPDATE_METRICS[self.metric].unit
        return title_of(self.metric) + f" ({unit})" * (unit not in ("", "none", "share"))


def lag_figure(
    name: str, title: str, caption: str, *parts: LagCurves, height_in: float = 3.9, above_zero: bool = False
) -> FigureSpec:
    """Returns a figure of metrics by lag, with one of `parts` on each of its axes. above_zero: draws no zeros alone.

    A line is a bucket's running mean over the batches that have a value; a batch without neighbours is a dot.
    """

    def draw(telemetry: RunTelemetry, *axes: Axes) -> bool:
        for ax, part in zip(axes, parts, strict=True):
            for label, colour in zip(LAG_LABELS, LAG_COLOURS, strict=True):
                x, values = binned(numbers(telemetry.updates), column(telemetry.updates, lag_key(part.metric, label)))
                known = np.isfinite(values)
                if not known.any():
                    continue
                smooth = np.where(known, running_mean(values), np.nan)
                ax.plot(x, smooth, color=colour, label=f"lag {label}", linewidth=1.5)
                around = np.pad(known, 1)
                alone = known & ~around[:-2] & ~around[2:]
                ax.plot(x[alone], smooth[alone], color=colour, linestyle="none", marker="o", markersize=3)
            ax.set_ylabel(part.ylabel)
            part.setup(ax)
        axes[-1].set_xlabel("update")
        if axes[0].lines:
            legend_above(axes[0], columns=len(LAG_LABELS))
        drawn = [np.asarray(line.get_ydata(), dtype=float) for ax in axes for line in ax.lines]
        return any(np.any(y > 0) for y in drawn) if above_zero else bool(drawn)

    return FigureSpec(name, title, caption, draw, len(parts), height_in)


def as_share(ax: Axes) -> None:
    """Labels the y axis in percent, from 0 to 1 % at least."""
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylim(bottom=0, top=max(ax.get_ylim()[1], 0.01))
