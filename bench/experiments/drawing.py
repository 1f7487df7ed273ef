"""Shared by the figures of all experiments."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.experiments.experiment import CellResult
from penstock.deploy.report.drawing import running_mean
from penstock.deploy.report.figures import STYLE

Points = tuple[np.ndarray, np.ndarray]
"""Updates, and a value for each."""


def smoothed(curve: np.ndarray) -> Points:
    return np.arange(1, len(curve) + 1), running_mean(curve)


def accuracy(result: CellResult) -> Points:
    updates, values = zip(*result.accuracy, strict=True)
    return np.array(updates), np.array(values)


def draw_band(
    ax: Axes, seeds: Sequence[Points], colour: str, label: str, *, style: str = "-", alpha: float = 0.1
) -> None:
    """Draws the mean over seeds, and a band from the smallest to the largest of them."""
    x, values = seeds[0][0], np.stack([y for _, y in seeds])
    ax.plot(x, values.mean(0), color=colour, label=label, linewidth=1.5, linestyle=style)
    if len(values) > 1:
        ax.fill_between(x, values.min(0), values.max(0), color=colour, alpha=alpha, linewidth=0)


def save_all(figures: Mapping[Path, Callable[[], Figure]]) -> list[Path]:
    """Draws each figure into its SVG, without date or tool names: equal figures are equal files. Returns the files."""
    with matplotlib.rc_context(STYLE):
        for file, draw in figures.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            draw().savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return list(figures)
