"""A parity report as a picture: engine against trainer, and how far they part by position and by lag."""

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from penstock.consumers.parity.report import ParityReport, Status
from penstock.deploy.report import drawing
from penstock.deploy.report.figures import STYLE
from penstock.schemas.metrics import LAG_LABELS

COLOURS: dict[Status, str] = {"parity": drawing.TEAL, "mismatch": drawing.RED, "unclear": drawing.AMBER}
_LEAST = 1e-9
"""Gaps are drawn on a logarithmic axis; equal numbers go here."""
_BINS = 16
_TITLE_CHARACTERS = 150
_ROOM_FOR_LEGEND = 22
"""Points between axes and title."""


def write_pictures(report: ParityReport, folder: Path) -> list[Path]:
    """Writes `parity.svg` and `parity.png` into `folder` and returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "parity.svg", folder / "parity.png"]
    with matplotlib.rc_context(STYLE):
        figure = draw(report)
        figure.savefig(files[0], format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        figure.savefig(files[1], format="png", dpi=160, metadata={"Software": None})
    return files


def draw(report: ParityReport) -> Figure:
    figure = Figure(figsize=(12.6, 4.6), layout="constrained")
    title = "\n".join(textwrap.wrap(report.verdict.sentence, _TITLE_CHARACTERS)[:3])
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, color=COLOURS[report.verdict.status], fontweight="bold")
    against, by_position, by_lag = figure.subplots(1, 3)
    engine = np.array([point.engine for point in report.points])
    trainer = np.array([point.trainer for point in report.points])
    known = np.isfinite(engine) & np.isfinite(trainer)
    positions = np.array([point.position for point in report.points], dtype=float)
    colours = np.array([_lag_colour(point.lag) for point in report.points], dtype=object)
    _draw_scatter(against, engine[known], trainer[known], colours[known])
    _draw_by_position(by_position, positions[known], np.abs(engine - trainer)[known], report)
    _draw_by_lag(by_lag, report)
    return figure


def _lag_colour(lag: int) -> str:
    """-1 is a lag that is not known."""
    bucket = sum(lag >= int(label.rstrip("+").partition("-")[0]) for label in LAG_LABELS) - 1
    return drawing.LAG_COLOURS[bucket] if bucket >= 0 else drawing.MUTED


def _draw_scatter(ax: Axes, engine: np.ndarray, trainer: np.ndarray, colours: np.ndarray) -> None:
    ax.set_title("each token", pad=_ROOM_FOR_LEGEND)
    ax.set_xlabel("logprob recorded by the engine, nats")
    ax.set_ylabel("logprob by the trainer, nats")
    if not len(engine):
        _say_nothing(ax)
        return
    least = float(min(engine.min(), trainer.min()))
    ax.plot([least, 0], [least, 0], color=drawing.RULE, linewidth=1, zorder=1)
    # A picture of thousands of marks is a large file unless they are drawn as pixels.
    ax.scatter(engine, trainer, s=7, c=list(colours), alpha=0.45, linewidths=0, zorder=2, rasterized=True)


def _draw_by_position(ax: Axes, positions: np.ndarray, gaps: np.ndarray, report: ParityReport) -> None:
    ax.set_title("gap by position", pad=_ROOM_FOR_LEGEND)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("sampled tokens before it")
    ax.set_ylabel("|engine - trainer|, nats")
    _logarithmic(ax)
    if not len(gaps):
        _say_nothing(ax)
        return
    gaps = np.maximum(gaps, _LEAST)
    ax.scatter(positions, gaps, s=7, color=drawing.BLUE, alpha=0.2, linewidths=0, rasterized=True)
    edges = np.unique(np.linspace(0, positions.max() + 1, min(_BINS, int(positions.max()) + 1) + 1).round())
    bins = np.digitize(positions, edges) - 1
    filled = [n for n in range(len(edges) - 1) if (bins == n).any()]
    middles = [(edges[n] + edges[n + 1] - 1) / 2 for n in filled]
    ax.plot(
        middles, [gaps[bins == n].mean() for n in filled], color=drawing.INK, marker="o", markersize=3, label="mean"
    )
    _draw_tolerance(ax, report)


def _draw_by_lag(ax: Axes, report: ParityReport) -> None:
    ax.set_title("gap by lag", pad=_ROOM_FOR_LEGEND)
    ax.set_xlabel("lag, optimizer steps")
    ax.set_ylabel("|engine - trainer now|, nats")
    _logarithmic(ax)
    if not report.lags:
        _say_nothing(ax)
        return
    places = np.arange(len(report.lags))
    means = np.maximum([row.mean for row in report.lags], _LEAST)
    p99s = np.maximum([row.p99 for row in report.lags], _LEAST)
    ax.bar(places, means, color=[_colour_of(row.label) for row in report.lags], width=0.6, label="mean", zorder=2)
    ax.plot(places, p99s, linestyle="none", marker="_", markersize=22, color=drawing.INK, label="p99", zorder=3)
    ax.set_xticks(places, [f"{row.label}\n{row.num_tokens:,} tokens" for row in report.lags])
    ax.set_ylim(bottom=min(float(means.min()), report.tolerance.mean) / 3)
    _draw_tolerance(ax, report)


def _logarithmic(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(numticks=8))
    # The usual labels are formulas, and those are switched off: a name may hold a dollar sign.
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _colour_of(label: str) -> str:
    return drawing.LAG_COLOURS[LAG_LABELS.index(label)] if label in LAG_LABELS else drawing.MUTED


def _draw_tolerance(ax: Axes, report: ParityReport) -> None:
    mean = report.tolerance.mean
    ax.axhline(mean, color=drawing.RED, linewidth=1, linestyle="--", label=f"allowed mean, {report.dtype}")
    drawing.legend_above(ax, columns=3)


def _say_nothing(ax: Axes) -> None:
    ax.set_yscale("linear")
    ax.text(0.5, 0.5, "nothing to draw", ha="center", va="center", transform=ax.transAxes, color=drawing.MUTED)
