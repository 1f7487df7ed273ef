"""Shared by the figures of all experiments."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw_band(
    ax: Axes, x: np.ndarray, values: np.ndarray, colour: str, label: str | None, *, style: str = "-", alpha: float = 0.1
) -> None:
    """Draws the mean over seeds, and a band from the smallest to the largest of them. values: [seeds, points]."""
    ax.plot(x, values.mean(0), color=colour, label=label, linewidth=1.5, linestyle=style)
    if len(values) > 1:
        ax.fill_between(x, values.min(0), values.max(0), color=colour, alpha=alpha, linewidth=0)


def save(figure: Figure, file: Path) -> Path:
    """Writes an SVG without date or tool names: equal figures are equal files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return file
