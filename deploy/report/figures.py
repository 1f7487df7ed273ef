"""The style, order and rendering of the report's figures."""

import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.deploy.report import drawing, lag_panels, panels
from penstock.deploy.report.drawing import FigureSpec
from penstock.deploy.report.telemetry import RunTelemetry

WIDTH_IN = 6.4
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": drawing.INK,
    "text.parse_math": False,  # a producer may be called `$x$`
    "axes.labelcolor": drawing.INK,
    "axes.labelsize": 10,
    "axes.edgecolor": drawing.RULE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": drawing.GRID,
    "grid.linewidth": 0.8,
    "xtick.color": drawing.RULE,
    "ytick.color": drawing.RULE,
    "xtick.labelcolor": drawing.INK,
    "ytick.labelcolor": drawing.INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: searchable, read aloud, a third of the size
    "svg.hashsalt": "penstock",  # the same run draws the same bytes
}

FIGURES = (
    panels.learning_by_update,
    panels.learning_by_time,
    panels.reward_parts,
    panels.reward_spread,
    panels.completions,
    panels.lag_histogram,
    panels.lag_by_update,
    panels.ess_chi2,
    panels.kl,
    lag_panels.mismatch_against_lag,
    lag_panels.ess_by_lag,
    lag_panels.kl_by_lag,
    lag_panels.chi2_by_lag,
    lag_panels.weight_by_lag,
    lag_panels.masked_by_lag,
    panels.clip_fractions,
    panels.reference_kl,
    panels.teacher_kl,
    panels.entropy,
    panels.grad_norm,
    panels.learning_signal,
    panels.tokens_per_s,
    panels.pauses,
    panels.queue_depth,
    panels.trainer_time,
)


def figure_svg(spec: FigureSpec, telemetry: RunTelemetry) -> str:
    """Renders a figure as an SVG element that refers to nothing outside it; "" if it has no data."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, spec.height_in), layout="constrained")
        if not draw(spec, figure, telemetry):
            return ""
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _embeddable(buffer.getvalue(), spec)


def draw(spec: FigureSpec, figure: Any, telemetry: RunTelemetry) -> bool:
    """Draws into a figure or a part of one; without data, a note takes the place of the axes."""
    axes: list[Axes] = list(figure.subplots(spec.num_axes, 1, sharex=True, squeeze=False).flat)
    has_data = spec.draw(telemetry, *axes)
    if not has_data:
        for ax in axes:
            ax.clear()
            ax.set_axis_off()
        axes[0].text(0.5, 0.5, "no data", ha="center", va="center", color=drawing.MUTED)
    return has_data


def _embeddable(document: str, spec: FigureSpec) -> str:
    """Extracts the <svg> element: scalable, named for screen readers, its ids unique within a page of many."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{spec.name}-', svg)
    svg = re.sub(r'href="#', f'href="#{spec.name}-', svg)
    svg = svg.replace("url(#", f"url(#{spec.name}-")
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-labelledby="{spec.name}-title {spec.name}-caption">{rest}'
