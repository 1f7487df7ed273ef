"""Shows a parity report as text, and as a picture: engine against trainer, and the gap by position and by lag."""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.consumers.parity.report import ParityReport, Status, Verdict
from penstock.consumers.parity.tolerance import Gap
from penstock.deploy.report import drawing
from penstock.deploy.report.figures import STYLE
from penstock.schemas.metrics import LAG_LABELS, lag_label
from penstock.schemas.policy import VERSIONS_PER_EPOCH

_WORDS: dict[Status, tuple[str, str]] = {
    "parity": ("PARITY", "green"),
    "mismatch": ("MISMATCH", "red"),
    "unclear": ("COULD NOT TELL", "yellow"),
}
_VERSIONS_SHOWN = 6
_LAYERS_SHOWN = 6
_WIDTH = 140
COLOURS: dict[Status, str] = {"parity": drawing.TEAL, "mismatch": drawing.RED, "unclear": drawing.AMBER}
_LEAST = 1e-9
"""Gaps are drawn on a logarithmic axis; 0 is drawn here."""
_BINS = 16
_TITLE_CHARACTERS = 150
_ROOM_FOR_LEGEND = 22
"""Points between axes and title."""


def print_report(report: ParityReport, title: str, console: Console | None = None) -> None:
    """Prints the input, the hypotheses with their residuals, lags, layers, notes, and the verdict last; to stdout by
    default."""
    console = console or _console()
    _say(
        console,
        f"Parity of {title}: {report.num_groups:,} groups, {report.num_rollouts:,} rollouts, {report.num_tokens:,} "
        f"tokens, {_versions(report.versions)}, {report.dtype}, {report.seconds:.1f} s",
    )
    console.print(_hypotheses(report))
    if report.lags:
        _say(console, "Objective: recorded logprobs against the trainer as it is now, by lag")
        console.print(_lags(report))
    if report.layers:
        _say(console, "Layers: engine against trainer on the same input, relative error")
        console.print(_layers(report))
    for note in report.notes:
        _say(console, f"note: {note}")
    console.print()
    print_verdict(report.verdict, console)


def print_verdict(verdict: Verdict, console: Console | None = None) -> None:
    """Prints the verdict, and the advice unless the verdict contains it."""
    console = console or _console()
    word, colour = _WORDS[verdict.status]
    sentence = verdict.sentence.removeprefix("parity: ").removeprefix("could not tell: ")
    console.print(f"[bold {colour}]{word}[/]  {escape(sentence)}", soft_wrap=True)
    if verdict.advice and verdict.advice not in verdict.sentence:
        _say(console, verdict.advice)


def _versions(versions: tuple[int, ...]) -> str:
    """Lists versions by their number within the epoch, or as `epoch:steps` if there were several epochs."""
    if not versions:
        return "no policy"
    several = max(versions) >= VERSIONS_PER_EPOCH
    names = ["{}:{}".format(*divmod(v, VERSIONS_PER_EPOCH)) if several else str(v) for v in versions]
    if len(names) > _VERSIONS_SHOWN:
        names = [*names[: _VERSIONS_SHOWN - 1], "...", names[-1]]
    return f"{'policy' if len(versions) == 1 else 'policies'} {', '.join(names)}"


def _hypotheses(report: ParityReport) -> Table:
    table = _table(("layer", "these are logprobs ..."), ("tokens", "mean", "p99", "max"), has_remark=True)
    before = ""
    for each in report.hypotheses:
        layer = each.layer if each.layer != before else ""
        before = each.layer
        style = "bold" if each.name == report.verdict.cause else ""
        within = "within tolerance" if report.tolerance.allows(each.gap) else ""
        remark = "; ".join(filter(None, (within, each.note)))
        table.add_row(layer, escape(each.says), *_numbers(each.gap), escape(remark), style=style)
    return table


def _numbers(gap: Gap) -> tuple[str, str, str, str]:
    if not gap.num_tokens:
        return "0", "-", "-", "-"
    return f"{gap.num_tokens:,}", f"{gap.mean:.1e}", f"{gap.p99:.1e}", f"{gap.max:.1e}"


def _lags(report: ParityReport) -> Table:
    table = _table((), ("lag", "tokens", "mean |Δ|", "p99 |Δ|", "KL", "k3", "χ²", "ESS", "|ratio - 1| ·10⁴"))
    for row in report.lags:
        table.add_row(
            row.label,
            f"{row.num_tokens:,}",
            *(f"{value:.1e}" for value in (row.mean, row.p99, row.kl, row.k3_kl, row.chi2)),
            f"{row.ess_fraction:.4f}",
            f"{row.ratio_deviation:.3g}",
        )
    return table


def _layers(report: ParityReport) -> Table:
    """Shows the layers that are off, else the worst few."""
    table = _table(("part",), ("error", "allowed"), has_remark=True)
    off = [layer for layer in report.layers if layer.is_off]
    ranked = sorted(report.layers, key=lambda layer: -layer.error / layer.allowed)
    shown = off[:_LAYERS_SHOWN] or ranked[:_LAYERS_SHOWN]
    for layer in shown:
        table.add_row(escape(layer.name), f"{layer.error:.1e}", f"{layer.allowed:.0e}", "OFF" if layer.is_off else "")
    if len(shown) < len(report.layers):
        table.add_row(f"... {len(report.layers) - len(shown)} more", "", "", "")
    return table


def _table(texts: Sequence[str], numbers: Sequence[str], *, has_remark: bool = False) -> Table:
    """Makes an empty table: columns of text, columns of numbers, and a column without a heading for remarks."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    if has_remark:
        table.add_column("", overflow="fold")
    return table


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _console() -> Console:
    """Makes a console on stdout, of a fixed width for a pipe or a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


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
    labels = [lag_label(point.lag) if point.lag >= 0 else "unknown" for point in report.points]
    colours = np.array([_colour_of(label) for label in labels], dtype=object)
    _draw_scatter(against, engine[known], trainer[known], colours[known])
    _draw_by_position(by_position, positions[known], np.abs(engine - trainer)[known], report)
    _draw_by_lag(by_lag, report)
    return figure


def _draw_scatter(ax: Axes, engine: np.ndarray, trainer: np.ndarray, colours: np.ndarray) -> None:
    ax.set_title("each token", pad=_ROOM_FOR_LEGEND)
    ax.set(xlabel="logprob recorded by the engine, nats", ylabel="logprob by the trainer, nats")
    if not len(engine):
        _say_nothing(ax)
        return
    least = float(min(engine.min(), trainer.min()))
    ax.plot([least, 0], [least, 0], color=drawing.RULE, linewidth=1, zorder=1)
    # Thousands of vector marks make a large file.
    ax.scatter(engine, trainer, s=7, c=list(colours), alpha=0.45, linewidths=0, zorder=2, rasterized=True)


def _draw_by_position(ax: Axes, positions: np.ndarray, gaps: np.ndarray, report: ParityReport) -> None:
    ax.set_title("gap by position", pad=_ROOM_FOR_LEGEND)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="sampled tokens before it", ylabel="|engine - trainer|, nats")
    _logarithmic(ax)
    if not len(gaps):
        _say_nothing(ax)
        return
    gaps = np.maximum(gaps, _LEAST)
    ax.scatter(positions, gaps, s=7, color=drawing.BLUE, alpha=0.2, linewidths=0, rasterized=True)
    edges = np.unique(np.linspace(0, positions.max() + 1, min(_BINS, int(positions.max()) + 1) + 1).round())
    bins = np.digitize(positions, edges) - 1
    filled = np.unique(bins)
    middles, means = (edges[filled] + edges[filled + 1] - 1) / 2, [gaps[bins == n].mean() for n in filled]
    ax.plot(middles, means, color=drawing.INK, marker="o", markersize=3, label="mean")
    _draw_tolerance(ax, report)


def _draw_by_lag(ax: Axes, report: ParityReport) -> None:
    ax.set_title("gap by lag", pad=_ROOM_FOR_LEGEND)
    ax.set(xlabel="lag, optimizer steps", ylabel="|engine - trainer now|, nats")
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
    # The default labels are formulas, which STYLE switches off since a name may hold a dollar sign.
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
