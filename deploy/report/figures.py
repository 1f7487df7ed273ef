"""Lists the report's figures, and renders them in its style."""

import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from penstock.deploy.report import drawing, panels
from penstock.deploy.report.drawing import AMBER, BLUE, RED, TEAL, VIOLET, Curves, FigureSpec, curves_figure
from penstock.deploy.report.lag_panels import LagCurves, as_share, lag_figure, mismatch_against_lag
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
    curves_figure(
        "reward-spread",
        "Spread of the reward by update",
        "Standard deviation of the rewards of one group, mean over the groups: advantages are made of it. At 0 nothing "
        "is left to learn from.",
        Curves("standard deviation", [("reward_std", TEAL, "spread")], from_zero=True),
    ),
    curves_figure(
        "completions",
        "Completion length and truncated completions by update",
        "Sampled tokens of a rollout, and the share cut off at the token limit: where that grows, answers that would "
        "have been right are scored as wrong.",
        Curves("tokens a rollout", [("completion_tokens", BLUE, "length")], from_zero=True),
        Curves("truncated", [("truncated_frac", RED, "truncated")], from_zero=True, percent=True),
        height_in=3.7,
    ),
    panels.lag_histogram,
    panels.lag_by_update,
    panels.ess_chi2,
    curves_figure(
        "kl",
        "KL between engine and trainer by update",
        "Both should stay small; a jump to a new level at unchanged lag points at the engine, not at drift.",
        Curves(
            "KL (nats per token)",
            [
                ("rollout_correction/kl", BLUE, "KL: mean of behavior minus proximal"),
                ("rollout_correction/k3_kl", AMBER, "k3 estimate"),
            ],
        ),
        height_in=3.7,
    ),
    mismatch_against_lag,
    lag_figure(
        "ess-by-lag",
        "Effective sample size by lag",
        "As a share of the tokens: of the ratios as they are, and of the weights applied. What lies between the two is "
        "what truncation hides.",
        LagCurves("ess_fraction", drawing.in_percent),
        LagCurves("applied_ess_fraction", drawing.in_percent),
    ),
    lag_figure(
        "kl-by-lag",
        "KL between engine and trainer by lag",
        "Per token. The line of lag 0 must stay flat: if it rises, the engine computes something else. That of "
        "0-mixed, in rows that met an update, is drift already. k3 is never negative.",
        LagCurves("kl"),
        LagCurves("k3_kl"),
    ),
    lag_figure(
        "chi2-by-lag",
        "χ² by lag",
        "The variance that the ratios bring into the gradient; above 1 an old token says less than its noise.",
        LagCurves("chi2"),
        height_in=3.1,
    ),
    lag_figure(
        "weight-by-lag",
        "Importance weight and share of tokens corrected by lag",
        "Weights near 1 are without bias; one that falls with lag is the correction trusting old tokens less. Below "
        "the share of tokens whose weight it bounded or took away.",
        LagCurves("weight_mean"),
        LagCurves("corrected_frac", as_share),
    ),
    lag_figure(
        "rejected-by-lag",
        "Rejected tokens by lag and sign of the advantage",
        "Share of the tokens of that sign that the correction gave no weight; a share that "
        "differs much between the signs tilts what is learned.",
        LagCurves("rejected_frac_positive", as_share),
        LagCurves("rejected_frac_negative", as_share),
        above_zero=True,
    ),
    curves_figure(
        "clip-fractions",
        "Clipped tokens by update",
        "A few per cent are normal; a rising share means too large a step, or data too old for their weight.",
        Curves(
            "share of tokens",
            [
                ("rollout_correction/clipped_frac", AMBER, "importance ratio (engine, lag)"),
                ("policy_clipped_frac", VIOLET, "policy ratio (this update)"),
            ],
            percent=True,
        ),
    ),
    curves_figure(
        "reference-kl",
        "KL to the reference model by update",
        "How far the policy has gone from where it began; a steep rise without reward is a policy gone astray.",
        Curves("KL (nats per token)", [("reference_kl", VIOLET, "KL")]),
    ),
    curves_figure(
        "teacher-kl",
        "KL to the teacher by update",
        "How far the policy is from its teacher on its own samples: it falls while it learns, and levels off at what "
        "the policy cannot do.",
        Curves("KL (nats per token)", [("teacher_kl", TEAL, "KL")]),
    ),
    curves_figure(
        "entropy",
        "Entropy by update",
        "It should fall slowly while the reward rises; a plunge to 0 before that is a policy that stopped exploring.",
        Curves("entropy (nats per token)", [("entropy", TEAL, "entropy")], from_zero=True),
    ),
    panels.grad_norm,
    panels.learning_signal,
    panels.tokens_per_s,
    panels.pauses,
    curves_figure(
        "queue-depth",
        "Groups waiting for the trainer",
        "Never empty: the trainer is the bottleneck. Always empty: the producers are.",
        Curves("groups read and waiting", [("queue_depth", VIOLET, "groups")], from_zero=True),
    ),
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
