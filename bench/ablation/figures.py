"""The six figures of an ablation, after those of ServiceNow's report."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.ablation.plan import AblationPlan
from bench.ablation.results import AblationResult, of_arm
from bench.experiments.drawing import Points, accuracy, draw_band, save_all, smoothed
from penstock.deploy.report import drawing

CLIP_RATE, KL, ENTROPY, REWARD = "clamp_log_ratio_new_old_indicator", "kl_new_old", "entropy", "reward"
COLOURS = (drawing.RED, drawing.AMBER, drawing.VIOLET, drawing.TEAL, drawing.BLUE, "#db2777", "#65a30d", "#92400e")
FAR = 5.0
"""An arm whose ratio strays this many times as far as the reference's has a panel of its own scale."""
NAMES = ("metrics", "logprobs-reward", "clip-entropy-reward", "policy-ratio", "lag", "final-reward")


class Panel(NamedTuple):
    """One curve of some arms. has_zero: draws a line at 0."""

    title: str
    arms: Sequence[str]
    points: Callable[[AblationResult], Points]
    unit: str = ""
    has_zero: bool = False


def figure_files(plan: AblationPlan) -> dict[str, Path]:
    """Returns the file of each figure by its name in NAMES."""
    return {name: plan.page.parent / f"{plan.name}-{name}.svg" for name in NAMES}


def draw_figures(plan: AblationPlan, results: Sequence[AblationResult]) -> list[Path]:
    """Writes the figures next to the page and returns their files. Every arm drawn needs a result."""
    beside = [plan.reference, *plan.compared]
    present = [arm.name for arm in plan.arms if of_arm(results, arm.name)]

    def stray(arm: str) -> float:
        return max(float(np.nanmean(np.abs(result.ratio_deviation))) for result in of_arm(results, arm))

    def named(name: str, arms: Sequence[str]) -> Panel:
        return Panel(name, arms, lambda result: smoothed(result.curve(name)))

    near = [arm for arm in present if stray(arm) <= FAR * stray(plan.reference)]
    ratio = Panel("all arms", present, lambda r: smoothed(r.ratio_deviation), "(policy ratio - 1) x 10⁴", has_zero=True)
    # By figure: its columns, its height, its panels.
    curves: dict[str, tuple[int, float, list[Panel]]] = {
        "metrics": (2, 5.5, [named(name, beside) for name in (CLIP_RATE, KL, ENTROPY, REWARD)]),
        "logprobs-reward": (
            2,
            3.2,
            [Panel("current logprobs", beside, lambda r: smoothed(r.current_logprobs)), named(REWARD, beside)],
        ),
        "clip-entropy-reward": (3, 3.0, [named(name, beside[:2]) for name in (CLIP_RATE, ENTROPY, REWARD)]),
        "policy-ratio": (2, 3.2, [ratio, ratio._replace(title="without those that stray far", arms=near, unit="")]),
        "final-reward": (2, 3.6, [named(REWARD, present), Panel("held-out greedy accuracy", present, accuracy)]),
    }

    def draw(name: str) -> Figure:
        return _lag(plan, results, present) if name == "lag" else _curves(plan, results, *curves[name])

    return save_all({file: partial(draw, name) for name, file in figure_files(plan).items()})


def _curves(
    plan: AblationPlan, results: Sequence[AblationResult], columns: int, height: float, panels: Sequence[Panel]
) -> Figure:
    figure = Figure(figsize=(10.4, height), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(panels) // columns, columns, sharex=True).flat)
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_title(panel.title)
        ax.set_ylabel(panel.unit)
        if panel.has_zero:
            ax.axhline(0, color=drawing.RULE, linewidth=0.8)
        for arm in panel.arms:
            seeds = [panel.points(result) for result in of_arm(results, arm)]
            colour, style = (drawing.INK, "--") if arm == plan.reference else (_colour(plan, arm), "-")
            label = plan.arm(arm).label + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "")
            draw_band(ax, seeds, colour, label, style=style, alpha=0.12)
    return _with_legend(figure, axes, columns)


def _lag(plan: AblationPlan, results: Sequence[AblationResult], arms: Sequence[str]) -> Figure:
    """Draws a panel for each arm with a line for each engine, from the arm's first seed."""
    columns = 3
    rows = -(-len(arms) // columns)
    figure = Figure(figsize=(10.4, 0.5 + 2.0 * rows), layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for ax in panels[len(arms) :]:
        ax.set_axis_off()
    for ax, arm in zip(panels, arms, strict=False):
        ax.set_title(plan.arm(arm).label)
        first = of_arm(results, arm)[0]
        for colour, (producer, lags) in zip(drawing.SERIES, first.engine_lag.items(), strict=False):
            values = np.array([np.nan if lag is None else lag for lag in lags], dtype=float)
            drawing.noisy_line(ax, np.arange(1, len(values) + 1), values, colour, producer)
        ax.set_ylim(bottom=0)
    for ax in panels[::columns]:
        ax.set_ylabel("optimizer steps")
    return _with_legend(figure, panels[: len(arms)], columns)


def _colour(plan: AblationPlan, arm: str) -> str:
    others = [other.name for other in plan.arms if other.name != plan.reference]
    return COLOURS[others.index(arm) % len(COLOURS)]


def _with_legend(figure: Figure, panels: Sequence[Axes], columns: int) -> Figure:
    for ax in panels[-columns:]:
        ax.set_xlabel("update")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure
