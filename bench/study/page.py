"""The study's part of docs/corrections.md: tables, findings, and a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.study.cells import (
    COMPARED_LAG,
    COMPARED_PACE,
    GRID_SEED,
    LAGS,
    METHODS,
    OBJECTIVE_LAGS,
    OBJECTIVES,
    PACES,
    REFERENCE,
    SEEDS,
    Pace,
    StudyCell,
    StudyResult,
)
from penstock.deploy.report import drawing
from penstock.deploy.report.figures import STYLE
from penstock.schemas.config import ConfigError
from penstock.schemas.process.files import write_whole

PAGE = Path(__file__).parents[2] / "docs" / "corrections.md"
PICTURE = "corrections-study.png"
BEGIN, END = "<!-- study: written by `python -m bench.study`, not by hand -->", "<!-- /study -->"
COLOURS = (drawing.RED, drawing.AMBER, drawing.BLUE, drawing.TEAL, drawing.VIOLET)
"""Of the methods."""

Results = dict[StudyCell, StudyResult]


def present(results: Results, page: Path = PAGE) -> None:
    """Writes the tables into the page, and the picture of the first study beside it.

    Raises:
        ConfigError: the page has no place for the tables.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page}: expected {BEGIN} and after it {END}")
    write_whole(page, f"{before}{BEGIN}\n\n{render(results)}\n{END}{after}")
    with matplotlib.rc_context(STYLE):
        draw(results).savefig(page.with_name(PICTURE), dpi=90, metadata={"Software": None})
    print(f"wrote {page} and {PICTURE} beside it")


def render(results: Results) -> str:
    """Returns the tables of the first study, what its seeds agree on, and the second one's as far as it has come."""
    tables = [_compared_table(results), _findings(results), *(_grid_table(results, pace) for pace in PACES)]
    return "\n".join([*tables, _objectives_table(results)])


def draw(results: Results) -> Figure:
    """Draws held-out accuracy by update at the pace that is compared, a panel for each lag."""
    figure = Figure(figsize=(10.4, 3.4), layout="constrained")
    panels: list[Axes] = list(figure.subplots(1, len(LAGS), sharex=True, sharey=True))
    for ax, lag in zip(panels, LAGS, strict=True):
        seeds = SEEDS if lag == COMPARED_LAG else (GRID_SEED,)
        ax.set_title(f"lag {lag}" + (f", {len(seeds)} seeds" if len(seeds) > 1 else ""))
        ax.set_xlabel("update")
        lines = [(0, REFERENCE, drawing.INK, "lag 0, no correction", "--")]
        lines += [
            (lag, method.name, colour, method.label, "-") for method, colour in zip(METHODS, COLOURS, strict=True)
        ]
        for line_lag, method, colour, label, style in lines:
            found = [results[_cell(COMPARED_PACE, line_lag, method, seed)].accuracy for seed in seeds]
            updates, values = [update for update, _ in found[0]], np.array([[y for _, y in line] for line in found])
            ax.plot(updates, values.mean(0), color=colour, label=label, linewidth=1.5, linestyle=style)
            if len(seeds) > 1:
                ax.fill_between(updates, values.min(0), values.max(0), color=colour, alpha=0.1, linewidth=0)
    panels[0].set_ylabel("held-out accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of cells as a markdown table, the first as its head."""
    title, *body = rows
    return "".join(f"| {' | '.join(line)} |\n" for line in [title, ["---"] * len(title), *body])


def _grid_table(results: Results, pace: Pace) -> str:
    on_policy = results[_cell(pace.name, 0, REFERENCE, GRID_SEED)]
    rows = [["method", *(f"lag {lag}" for lag in LAGS)]]
    for method in METHODS:
        found = [results[_cell(pace.name, lag, method.name, GRID_SEED)] for lag in LAGS]
        rows.append([method.label, *(f"{_share(r.mean_accuracy)} ({_share(r.last_accuracy)})" for r in found)])
    uncorrected = [results[_cell(pace.name, lag, REFERENCE, GRID_SEED)] for lag in LAGS]
    rows.append(["mean ESS without correction", *(f"{result.mean_ess:.3f}" for result in uncorrected)])
    return (
        f"**One seed, {pace.label}.** Mean accuracy, in brackets that at the end; at lag 0 without correction "
        f"{_share(on_policy.mean_accuracy)} ({_share(on_policy.last_accuracy)}).\n\n{table(rows)}"
    )


def _compared_table(results: Results) -> str:
    pace = next(pace for pace in PACES if pace.name == COMPARED_PACE)
    rows = [["", "method", *(f"seed {seed}" for seed in SEEDS), "mean", "at the end", "ESS", "above, in every seed"]]
    lines = [("on-policy", "lag 0, no correction", 0, REFERENCE)]
    lines += [(str(n), method.label, COMPARED_LAG, method.name) for n, method in enumerate(METHODS, 1)]
    for number, label, lag, method in lines:
        found = [results[_cell(COMPARED_PACE, lag, method, seed)] for seed in SEEDS]
        rows.append(
            [
                number,
                label,
                *(_share(result.mean_accuracy) for result in found),
                f"**{_share(fmean(result.mean_accuracy for result in found))}**",
                _share(fmean(result.last_accuracy for result in found)),
                f"{fmean(result.mean_ess for result in found):.3f}",
                ", ".join(beaten(results, method)) if lag else "",
            ]
        )
    rows[1][0] = ""
    return (
        f"**{len(SEEDS)} seeds, lag {COMPARED_LAG}, {pace.label}.** Mean accuracy of each seed and of all, accuracy at "
        f"the end, mean ESS, and the methods that this one is above in every seed.\n\n{table(rows)}"
    )


def _objectives_table(results: Results) -> str:
    rows = [["objective", *(f"lag {lag}" for lag in OBJECTIVE_LAGS), "ESS"]]
    for method in OBJECTIVES:
        of_lag = [
            [results.get(_cell(COMPARED_PACE, lag, method.name, seed)) for seed in SEEDS] for lag in OBJECTIVE_LAGS
        ]
        finished = [[each for each in found if each is not None] for found in of_lag]
        shown = [_spread_of(found) if len(found) == len(SEEDS) else "not finished" for found in finished]
        last = finished[-1]
        rows.append([method.label, *shown, f"{fmean(each.mean_ess for each in last):.3f}" if last else ""])
    return (
        f"**Objectives, {len(SEEDS)} seeds, ten times the demo's learning rate.** Mean accuracy, the mean of the "
        "seeds ± their standard deviation, in brackets that at the end; ESS at lag "
        f"{OBJECTIVE_LAGS[-1]}.\n\n{table(rows)}"
    )


def _spread_of(found: Sequence[StudyResult]) -> str:
    means = [100 * each.mean_accuracy for each in found]
    return f"{fmean(means):.1f} ± {stdev(means):.1f} % ({_share(fmean(each.last_accuracy for each in found))})"


def beaten(results: Results, method: str) -> list[str]:
    """Returns the numbers of the methods whose mean accuracy is lower in every seed."""
    own = _by_seed(results, method, lambda result: result.mean_accuracy)
    return [
        str(n)
        for n, other in enumerate(METHODS, 1)
        if all(a > b for a, b in zip(own, _by_seed(results, other.name, lambda r: r.mean_accuracy), strict=True))
    ]


def _findings(results: Results) -> str:
    """Returns the order of the means, and the spread of one method's seeds."""
    means = {method.label: fmean(_by_seed(results, method.name, lambda r: r.mean_accuracy)) for method in METHODS}
    order = sorted(means, key=lambda label: -means[label])
    spreads = {method.label: _spread(results, method.name) for method in METHODS}
    widest = max(spreads, key=lambda label: spreads[label])
    ranked = "; ".join(f"{label} {_share(means[label])}" for label in order)
    return (
        f"From best to worst by the mean of {len(SEEDS)} seeds: {ranked}. Seeds of one method lie up to "
        f"{100 * spreads[widest]:.0f} points apart ({widest}).\n"
    )


def _spread(results: Results, method: str) -> float:
    values = _by_seed(results, method, lambda result: result.mean_accuracy)
    return max(values) - min(values)


def _by_seed(results: Results, method: str, value: Callable[[StudyResult], float]) -> list[float]:
    return [value(results[_cell(COMPARED_PACE, COMPARED_LAG, method, seed)]) for seed in SEEDS]


def _cell(pace: str, lag: int, method: str, seed: int) -> StudyCell:
    return StudyCell(pace=pace, lag=lag, method=method, seed=seed)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
