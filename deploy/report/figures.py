"""The report's figures: how they look, which there are, and how they become SVG and PNG."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from penstock.deploy.report import drawing, lag_panels, panels
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


class FigureSpec(NamedTuple):
    """One figure: `draw` fills its axes, one below the other, and returns whether it had anything to draw.

    An optional one is left out of a report that has nothing for it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[..., bool]
    num_axes: int = 1
    height_in: float = 3.1
    source: str = "updates.jsonl"
    optional: bool = False


FIGURES = (
    FigureSpec(
        "learning-by-update",
        "Reward and held-out accuracy by update",
        "Accuracy should follow the reward up; a growing gap means a reward that pays for something else.",
        panels.learning_by_update,
        source="updates.jsonl, evaluations.jsonl",
    ),
    FigureSpec(
        "learning-by-time",
        "Reward and held-out accuracy by time",
        "The same against the clock: a flat stretch here that is none by update is time lost, not learning.",
        panels.learning_by_time,
        source="updates.jsonl, evaluations.jsonl",
    ),
    FigureSpec(
        "lag-histogram",
        "Tokens by lag",
        "Most tokens should lie at or below the lag bound; red is beyond it and was masked.",
        panels.lag_histogram,
    ),
    FigureSpec(
        "lag-by-update",
        "Lag by update",
        "Bands of steady height are a pipeline in balance; where darker bands grow, rollouts wait longer.",
        panels.lag_by_update,
    ),
    FigureSpec(
        "ess-chi2",
        "Effective sample size and χ² by update",
        "ESS near 100 % and χ² near 0 mean the data are nearly on-policy; a slide in ESS comes before a collapse.",
        panels.ess_and_chi2,
        num_axes=2,
        height_in=3.7,
    ),
    FigureSpec(
        "kl",
        "KL between engine and trainer by update",
        "Both should stay small; a jump to a new level at unchanged lag points at the engine, not at drift.",
        panels.kl,
        height_in=3.7,
    ),
    FigureSpec(
        "mismatch-against-lag",
        "Mismatch against lag",
        "The point at lag 0 is the gap between engine and trainer; what rises from there is drift, and calls for trust "
        "that falls with lag.",
        lag_panels.mismatch_against_lag,
    ),
    FigureSpec(
        "ess-by-lag",
        "Effective sample size by lag",
        "As a share of the tokens: of the ratios as they are, and of the weights applied. What lies between the two is "
        "what truncation hides.",
        lag_panels.ess_by_lag,
        num_axes=2,
        height_in=3.9,
    ),
    FigureSpec(
        "kl-by-lag",
        "KL between engine and trainer by lag",
        "Per token. The line of lag 0 must stay flat: if it rises, the engine computes something else. k3 is never "
        "negative.",
        lag_panels.kl_by_lag,
        num_axes=2,
        height_in=3.9,
    ),
    FigureSpec(
        "chi2-by-lag",
        "χ² by lag",
        "The variance that the ratios bring into the gradient; above 1 an old token says less than its noise.",
        lag_panels.chi2_by_lag,
    ),
    FigureSpec(
        "weight-by-lag",
        "Importance weight and share of tokens corrected by lag",
        "Weights near 1 are without bias; one that falls with lag is the correction trusting old tokens less. Below "
        "the share of tokens whose weight it bounded or took away.",
        lag_panels.weight_by_lag,
        num_axes=2,
        height_in=3.9,
    ),
    FigureSpec(
        "masked-by-lag",
        "Rejected tokens by lag and sign of the advantage",
        "Share of the tokens of that sign that the correction gave no weight, none under truncation; a share that "
        "differs much between the signs tilts what is learned.",
        lag_panels.masked_by_lag,
        num_axes=2,
        height_in=3.9,
    ),
    FigureSpec(
        "clip-fractions",
        "Clipped tokens by update",
        "A few per cent are normal; a rising share means too large a step, or data too old for their weight.",
        panels.clip_fractions,
    ),
    FigureSpec(
        "reference-kl",
        "KL to the reference model by update",
        "How far the policy has gone from where it began; a steep rise without reward is a policy gone astray.",
        panels.reference_kl,
        optional=True,
    ),
    FigureSpec(
        "entropy",
        "Entropy by update",
        "It should fall slowly while accuracy rises; a plunge to 0 before that is a policy that stopped exploring.",
        panels.entropy,
    ),
    FigureSpec(
        "grad-norm",
        "Gradient norm by update",
        "Spikes above the clip line are cut there; a trend upwards calls for a lower learning rate.",
        panels.grad_norm,
    ),
    FigureSpec(
        "learning-signal",
        "Groups with a learning signal",
        "Siblings that all earned the same teach nothing: a falling share means tasks too easy or too hard.",
        panels.learning_signal,
    ),
    FigureSpec(
        "tokens-per-s",
        "Tokens per second over time",
        "Flat lines are steady work; the trainer lacks, of the producers' sum, what is skipped or evaluation.",
        panels.tokens_per_s,
        source="producers/*.jsonl",
    ),
    FigureSpec(
        "pauses",
        "Pause per weight update",
        "How long sampling stood still for each load of weights: a narrow peak is good, a long tail is a busy machine.",
        panels.pauses,
        source="producers/*.jsonl",
    ),
    FigureSpec(
        "queue-depth",
        "Groups waiting for the trainer",
        "Never empty: the trainer is the bottleneck. Always empty: the producers are.",
        panels.queue_depth,
    ),
    FigureSpec(
        "trainer-time",
        "Where the trainer's time goes",
        "Time per update by phase: much waiting asks for more producers, much publishing for a faster weights folder.",
        panels.trainer_time,
    ),
)
PICTURE = ("learning-by-update", "lag-by-update", "ess-chi2", "tokens-per-s")
"""The figures of the README's picture, row by row."""


def figure_svg(spec: FigureSpec, telemetry: RunTelemetry) -> tuple[str, bool]:
    """The figure as an SVG element without a reference to anything outside it, and whether it had data."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, spec.height_in), layout="constrained")
        has_data = draw(spec, figure, telemetry)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _embeddable(buffer.getvalue(), spec), has_data


def write_png(telemetry: RunTelemetry, file: Path, names: tuple[str, ...] = PICTURE) -> None:
    """Draws the named figures two in a row, 160 dots per inch."""
    specs = [next(spec for spec in FIGURES if spec.name == name) for name in names]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(2 * WIDTH_IN, 3.4 * ((len(specs) + 1) // 2)), layout="constrained")
        parts = figure.subfigures((len(specs) + 1) // 2, 2, squeeze=False, wspace=0.03, hspace=0.04).flat
        for spec, part in zip(specs, parts, strict=False):
            part.suptitle(spec.title, x=0.02, ha="left", fontweight="bold", fontsize=11.5)
            draw(spec, part, telemetry)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="png", dpi=160, metadata={"Software": None})


def draw(spec: FigureSpec, figure: Any, telemetry: RunTelemetry) -> bool:
    """Fills a figure (or part of one); where there is no data, it says so in the axes' place."""
    axes: list[Axes] = list(figure.subplots(spec.num_axes, 1, sharex=True, squeeze=False).flat)
    has_data = spec.draw(telemetry, *axes)
    if not has_data:
        for ax in axes:
            ax.clear()
            ax.set_axis_off()
        axes[0].text(0.5, 0.5, f"no data in {spec.source}", ha="center", va="center", color=drawing.MUTED)
    return has_data


def _embeddable(document: str, spec: FigureSpec) -> str:
    """The <svg> element of a document: scalable, named for screen readers, its ids unique within a page of many."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{spec.name}-', svg)
    svg = re.sub(r'href="#', f'href="#{spec.name}-', svg)
    svg = svg.replace("url(#", f"url(#{spec.name}-")
    opening, rest = svg.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-labelledby="{spec.name}-title {spec.name}-caption">{rest}'
