"""The study's curves: reward and held-out accuracy by update, one column a lag, and ESS by lag."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.experiments.drawing import accuracy, draw_band, save_all, smoothed
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
    learning = {folder / CURVES.format(pace.name): partial(_learning_figure, results, pace) for pace in PACES}
    return save_all({**learning, folder / ESS: partial(_ess_figure, results)})


def _learning_figure(results: Sequence[StudyResult], pace: Pace) -> Figure:
    figure = Figure(figsize=(10.4, 5.6), layout="constrained")
    axes = figure.subplots(2, len(LAGS), sharex=True, sharey="row")
    for column, lag in enumerate(LAGS):
        rewards, accuracies = axes[:, column]
        seeds = SEEDS if (pace.name, lag) == (COMPARED_PACE, COMPARED_LAG) else (GRID_SEED,)
        rewards.set_title(f"lag {lag}" + (f", {len(seeds)} seeds" if len(seeds) > 1 else ""))
        lines = [(0, REFERENCE, drawing.INK, "lag 0, no correction", "--")]
        lines += [(lag, method.name, COLOURS[method.name], method.label, "-") for method in METHODS]
        for line_lag, method, colour, label, style in lines:
            found = _found(results, pace, line_lag, method, seeds)
            draw_band(rewards, [smoothed(result.curve("reward")) for result in found], colour, label, style=style)
            draw_band(accuracies, [accuracy(result) for result in found], colour, label, style=style)
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


def _found(
    results: Sequence[StudyResult], pace: Pace, lag: int, method: str, seeds: Sequence[int]
) -> list[StudyResult]:
    """Returns the results of one line, one for each seed."""
    wanted = [StudyCell(pace=pace.name, lag=lag, method=method, seed=seed) for seed in seeds]
    return [result for result in results if result.cell in wanted]
