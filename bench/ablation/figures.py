"""The six figures of an ablation, after those of ServiceNow's report."""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.ablation.plan import AblationPlan
from bench.ablation.results import AblationResult, of_arm
from bench.experiments.drawing import draw_band, save
from penstock.deploy.report import drawing
from penstock.deploy.report.figures import STYLE

Curve = Callable[[AblationResult], np.ndarray]
CLIP_RATE, KL, ENTROPY, REWARD = "clamp_log_ratio_new_old_indicator", "kl_new_old", "entropy", "reward"
COLOURS = (drawing.RED, drawing.AMBER, drawing.VIOLET, drawing.TEAL, drawing.BLUE, "#db2777", "#65a30d", "#92400e")
FAR = 5.0
"""An arm whose ratio strays this many times as far as the reference's has a panel of its own scale."""
NAMES = ("metrics", "logprobs-reward", "clip-entropy-reward", "policy-ratio", "lag", "final-reward")


def figure_files(plan: AblationPlan) -> dict[str, Path]:
    """Returns the file of each figure by its name in NAMES."""
    return {name: plan.page.parent / f"{plan.name}-{name}.svg" for name in NAMES}


def draw_figures(plan: AblationPlan, results: Sequence[AblationResult]) -> list[Path]:
    """Writes the figures beside the page and returns their files. Every arm drawn needs a result."""
    files = figure_files(plan)
    beside = [plan.reference, *plan.compared]
    with matplotlib.rc_context(STYLE):
        figures = {
            "metrics": _named_curves(plan, results, beside, (CLIP_RATE, KL, ENTROPY, REWARD), columns=2),
            "logprobs-reward": _logprobs_and_reward(plan, results, beside),
            "clip-entropy-reward": _named_curves(plan, results, beside[:2], (CLIP_RATE, ENTROPY, REWARD), columns=3),
            "policy-ratio": _policy_ratio(plan, results),
            "lag": _lag(plan, results),
            "final-reward": _final_reward(plan, results),
        }
        return [save(figures[name], file) for name, file in files.items()]


def _named_curves(
    plan: AblationPlan, results: Sequence[AblationResult], arms: Sequence[str], names: Sequence[str], *, columns: int
) -> Figure:
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(10.4, 0.5 + 2.5 * rows), layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, columns, sharex=True, squeeze=False).flat)
    for ax, name in zip(panels, names, strict=True):
        ax.set_title(name)
        _draw_arms(ax, plan, results, arms, lambda result, name=name: result.curve(name))  # type: ignore[misc]
    return _with_legend(figure, panels, columns)


def _logprobs_and_reward(plan: AblationPlan, results: Sequence[AblationResult], arms: Sequence[str]) -> Figure:
    figure = Figure(figsize=(10.4, 3.2), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharex=True))
    panels[0].set_title("current logprobs")
    _draw_arms(panels[0], plan, results, arms, lambda result: result.current_logprobs)
    panels[1].set_title("reward")
    _draw_arms(panels[1], plan, results, arms, lambda result: result.curve(REWARD))
    return _with_legend(figure, panels, 2)


def _policy_ratio(plan: AblationPlan, results: Sequence[AblationResult]) -> Figure:
    """Draws all arms on the left; on the right those that stay near the reference."""

    def stray(arm: str) -> float:
        return max(float(np.nanmean(np.abs(result.ratio_deviation))) for result in of_arm(results, arm))

    arms = _present(plan, results)
    near = [arm for arm in arms if stray(arm) <= FAR * stray(plan.reference)]
    figure = Figure(figsize=(10.4, 3.2), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharex=True))
    for ax, shown, title in ((panels[0], arms, "all arms"), (panels[1], near, "without those that stray far")):
        ax.set_title(title)
        ax.axhline(0, color=drawing.RULE, linewidth=0.8)
        _draw_arms(ax, plan, results, shown, lambda result: result.ratio_deviation)
    panels[0].set_ylabel("(policy ratio - 1) x 10⁴")
    return _with_legend(figure, panels, 2)


def _lag(plan: AblationPlan, results: Sequence[AblationResult]) -> Figure:
    """Draws a panel for each arm with a line for each engine, from the arm's first seed."""
    arms = _present(plan, results)
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


def _final_reward(plan: AblationPlan, results: Sequence[AblationResult]) -> Figure:
    figure = Figure(figsize=(10.4, 3.6), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, 2, sharex=True))
    arms = _present(plan, results)
    panels[0].set_title("reward")
    _draw_arms(panels[0], plan, results, arms, lambda result: result.curve(REWARD))
    panels[1].set_title("held-out greedy accuracy")
    for arm in arms:
        found = of_arm(results, arm)
        updates = np.array([update for update, _ in found[0].accuracy])
        values = np.stack([[value for _, value in result.accuracy] for result in found])
        _draw_band(panels[1], updates, values, plan, arm, label=False)
    return _with_legend(figure, panels, 2)


def _draw_arms(
    ax: Axes, plan: AblationPlan, results: Sequence[AblationResult], arms: Sequence[str], curve: Curve
) -> None:
    for arm in arms:
        curves = np.stack([drawing.running_mean(curve(result)) for result in of_arm(results, arm)])
        _draw_band(ax, np.arange(1, curves.shape[1] + 1), curves, plan, arm, label=True)


def _draw_band(ax: Axes, x: np.ndarray, values: np.ndarray, plan: AblationPlan, arm: str, *, label: bool) -> None:
    colour, style = (drawing.INK, "--") if arm == plan.reference else (_colour(plan, arm), "-")
    name = plan.arm(arm).label + (f" ({len(values)} seeds)" if len(values) > 1 else "")
    draw_band(ax, x, values, colour, name if label else None, style=style, alpha=0.12)


def _colour(plan: AblationPlan, arm: str) -> str:
    others = [other.name for other in plan.arms if other.name != plan.reference]
    return COLOURS[others.index(arm) % len(COLOURS)]


def _present(plan: AblationPlan, results: Sequence[AblationResult]) -> list[str]:
    return [arm.name for arm in plan.arms if of_arm(results, arm.name)]


def _with_legend(figure: Figure, panels: Sequence[Axes], columns: int) -> Figure:
    for ax in panels[-columns:]:
        ax.set_xlabel("update")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure
