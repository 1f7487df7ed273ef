"""The head section's picture: accuracy against time, and memory, from a result."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from bench.result import Figure, Result
from penstock.deploy.report import drawing
from penstock.deploy.report.figures import STYLE

MARKERS = {"float32": "o", "bfloat16": "^"}
COLOURS = {
    "recompute": drawing.BLUE,
    "in forward": drawing.TEAL,
    "TRL, chunked": drawing.AMBER,
    "cut-cross-entropy, torch": drawing.VIOLET,
    "torch, linear_cross_entropy": drawing.RED,
}


def draw_head(result: Result, file: Path) -> None:
    """Draws a result into an SVG; what it lacks is left out."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(10.5, 3.9), layout="constrained")
        left, right = canvas.subplots(1, 2, width_ratios=(1.15, 1))
        _accuracy_against_time(left, result)
        _memory(right, result)
        file.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator")))


def _accuracy_against_time(ax: Axes, result: Result) -> None:
    figures = {figure.name: figure for figure in result.figures}
    ax.axhline(2e-5, color=drawing.RULE, linestyle="--", linewidth=1.0)
    ax.text(0.995, 2.3e-5, "allowed", color=drawing.MUTED, fontsize=8, ha="right", transform=ax.get_yaxis_transform())
    for name, colour in COLOURS.items():
        for dtype, marker in MARKERS.items():
            entry = name if dtype == "float32" else f"{name}, {dtype}"
            timed = _starting(figures, f"{entry}: time")
            error = figures.get(f"{entry}: logprob error against float64")
            if timed is None or timed.ratio is None or error is None or error.measured is None:
                continue
            label = f"{'Penstock: ' if name in ('recompute', 'in forward') else ''}{name}"
            ax.plot(timed.ratio, error.measured, marker, color=colour, markersize=8, linestyle="none",
                    markerfacecolor=colour if dtype == "float32" else "white",
                    label=label if dtype == "float32" else None)  # fmt: skip
    ax.set(xscale="log", yscale="log")
    ax.set_xlabel("time, of naive float32 logits (forward and backward)")
    ax.set_ylabel("largest logprob error")
    ax.set_title("Accuracy against time (filled: float32 inputs, hollow: bfloat16)")
    _plain_numbers(ax.xaxis, "{x:g}")
    _plain_numbers(ax.yaxis, "{x:.0e}")
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if ax.get_xlim()[0] <= tick <= ax.get_xlim()[1]]
    ax.set_xticks(ticks)
    ax.legend(loc="center left", bbox_to_anchor=(0.0, 0.5), fontsize=8)


def _memory(ax: Axes, result: Result) -> None:
    """Draws a bar for each head and number of tokens; the naive one is the reference of ours."""
    bars: dict[str, tuple[float, str]] = {}
    for figure in result.figures:
        kind, _, rest = figure.name.partition(", ")
        if kind == "peak memory" and figure.measured is not None and figure.reference is not None:
            tokens, _, name = rest.partition(", ")
            bars[f"naive, {tokens}"] = figure.reference, drawing.RULE
            bars[f"{name}, {tokens}"] = figure.measured, COLOURS[name]
        name, _, tokens = figure.name.partition(": peak memory, ")
        if tokens and figure.measured is not None:
            bars.setdefault(f"{name}, {tokens}", (figure.measured, COLOURS[name]))
    labels = sorted(bars, key=_tokens_in)
    places = list(range(len(bars)))
    ax.barh(places, [bars[label][0] for label in labels], color=[bars[label][1] for label in labels], height=0.62)
    ax.set_yticks(places, labels, fontsize=8)
    ax.invert_yaxis()
    ax.set(xscale="log")
    _plain_numbers(ax.xaxis, "{x:,.0f}")
    ax.grid(axis="y", visible=False)
    for place, label in enumerate(labels):
        ax.text(bars[label][0] * 1.05, place, f"{bars[label][0]:,.0f}", va="center", fontsize=8)
    ax.set_xlim(right=max((value for value, _ in bars.values()), default=1.0) * 2.2)
    ax.set_xlabel("peak memory beyond the inputs, MB")
    ax.set_title("Memory")


def _tokens_in(label: str) -> int:
    """Returns 128 for `recompute, 128 tokens`; sorting by it keeps the order of equals."""
    return int(label.rpartition(", ")[2].partition(" ")[0])


def _plain_numbers(axis: Axis, form: str) -> None:
    """Labels a logarithmic axis with plain numbers: the style shows mathematics as text."""
    axis.set_major_formatter(StrMethodFormatter(form))
    axis.set_minor_formatter(NullFormatter())


def _starting(figures: dict[str, Figure], prefix: str) -> Figure | None:
    return next((figure for name, figure in figures.items() if name.startswith(prefix)), None)
