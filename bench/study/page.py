"""The study's tables and findings as markdown."""

from collections.abc import Callable, Sequence
from statistics import fmean

from bench.experiments.page import table
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

Results = dict[StudyCell, StudyResult]


def render(results: Sequence[StudyResult]) -> str:
    """Returns the tables of a complete study, and what the seeds agree on."""
    by_cell = {result.cell: result for result in results}
    parts = [_compared_table(by_cell), _findings(by_cell)]
    parts += [_grid_table(by_cell, pace) for pace in PACES]
    return "\n".join(parts)


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
