"""The study's curves: reward and held-out accuracy by update, one column a lag, and ESS by lag."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.experiments.drawing import draw_band, save
from bench.study.cells import (
    COMPARED_LAG,
    COMPARED_PACE,
    GRID_SEED,
    LAGS,
    METHODS,
    PACES,
    REFERENCE,
    SEEDS,
    Pace,
    StudyCell,
    StudyResult,
)
from penstock.deploy.report import drawing
from penstock.deploy.report.figures import STYLE

COLOURS = dict(
    zip(
        (method.name for method in METHODS),
        (drawing.RED, drawing.AMBER, drawing.BLUE, drawing.TEAL, "#db2777", drawing.VIOLET, "#65a30d"),
        strict=True,
    )
)
CURVES, ESS = "corrections-learning-{}.svg", "corrections-ess.svg"


def draw_curves(results: Sequence[StudyResult], folder: Path) -> list[Path]:
    """Writes the figures of a complete study into `folder` and returns their files."""
    with matplotlib.rc_context(STYLE):
        files = [save(_learning_figure(results, pace), folder / CURVES.format(pace.name)) for pace in PACES]
        return [*files, save(_ess_figure(results), folder / ESS)]


def _learning_figure(results: Sequence[StudyResult], pace: Pace) -> Figure:
    figure = Figure(figsize=(10.4, 5.6), layout="constrained")
    axes = figure.subplots(2, len(LAGS), sharex=True, sharey="row")
    for column, lag in enumerate(LAGS):
        rewards, accuracies = axes[:, column]
        seeds = SEEDS if (pace.name, lag) == (COMPARED_PACE, COMPARED_LAG) else (GRID_SEED,)
        rewards.set_title(f"lag {lag}" + (f", {len(seeds)} seeds" if len(seeds) > 1 else ""))
        reference = _found(results, pace, 0, REFERENCE, seeds)
        _draw(rewards, [_reward(result) for result in reference], drawing.INK, "lag 0, no correction", style="--")
        _draw(accuracies, [_accuracy(result) for result in reference], drawing.INK, None, style="--")
        for method in METHODS:
            found = _found(results, pace, lag, method.name, seeds)
            _draw(rewards, [_reward(result) for result in found], COLOURS[method.name], method.label)
            _draw(accuracies, [_accuracy(result) for result in found], COLOURS[method.name], None)
        accuracies.set_xlabel("update")
    axes[0, 0].set_ylabel("reward of the sampling policy")
    axes[1, 0].set_ylabel("held-out accuracy")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(pace.label[0].upper() + pace.label[1:], x=0.01, ha="left", fontweight="bold", fontsize=11.5)
    return figure


def _ess_figure(results: Sequence[StudyResult]) -> Figure:
    figure = Figure(figsize=(10.4, 3.2), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(PACES), sharey=True))
    for ax, pace in zip(panels, PACES, strict=True):
        ax.set_title(pace.label)
        for lag, shade in zip((0, *LAGS), (drawing.LAG_SHADES[n] for n in (1, 3, 4, 6)), strict=True):
            [result] = _found(results, pace, lag, REFERENCE, (GRID_SEED,))
            ess = result.curve("ess_fraction")
            drawing.noisy_line(ax, np.arange(1, len(ess) + 1), ess, shade, f"lag {lag}")
        ax.set_ylim(0, 1.03)
        ax.set_xlabel("update")
    panels[0].set_ylabel("ESS, no correction")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _draw(
    ax: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], colour: str, label: str | None, *, style: str = "-"
) -> None:
    """curves: (x, y) of each seed."""
    draw_band(ax, curves[0][0], np.stack([y for _, y in curves]), colour, label, style=style)


def _reward(result: StudyResult) -> tuple[np.ndarray, np.ndarray]:
    reward = result.curve("reward")
    return np.arange(1, len(reward) + 1), drawing.running_mean(reward)


def _accuracy(result: StudyResult) -> tuple[np.ndarray, np.ndarray]:
    updates, values = zip(*result.accuracy, strict=True)
    return np.array(updates), np.array(values)


def _found(
    results: Sequence[StudyResult], pace: Pace, lag: int, method: str, seeds: Sequence[int]
) -> list[StudyResult]:
    """Returns the results of one line, one for each seed."""
    wanted = [StudyCell(pace=pace.name, lag=lag, method=method, seed=seed) for seed in seeds]
    return [result for result in results if result.cell in wanted]
