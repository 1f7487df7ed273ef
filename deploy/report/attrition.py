"""Compares what was sampled with what was trained, in tables for the report and `penstock audit`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.deploy.report.lines import Update
from penstock.schemas.attrition import OUTCOMES, UNKNOWN, Attrition, Rollouts

NUM_WINDOWS = 4
"""Parts of the run that the report compares, with equally many updates each."""
Cells = list[str]
_COMPARED = (
    "sampled",
    *OUTCOMES,
    "masked for lag",
    *(f"{what}, sampled → trained" for what in ("length", "reward", "ended by")),
)


class CountTable(NamedTuple):
    """A table of the report. rows: the header first."""

    title: str
    rows: list[Cells]


class AttritionWindow(NamedTuple):
    """A part of the run. first, last: its updates. rollouts: its counts, by environment and outcome."""

    first: int
    last: int
    rollouts: dict[str, dict[str, Rollouts]]


def windows_of(updates: Sequence[Update]) -> list[AttritionWindow]:
    """Divides updates into `NUM_WINDOWS` windows of equal size, or fewer if there are fewer updates."""
    size = -(-len(updates) // NUM_WINDOWS)
    found = []
    for start in range(0, len(updates), size or 1):
        part = updates[start : start + size]
        counts = (each for line in part for each in Attrition(line.rollouts).counts())
        rollouts = _grouped((environment, outcome, own) for environment, outcome, _, own in counts)
        found.append(AttritionWindow(part[0].update, part[-1].update, rollouts))
    return found


def attrition_tables(attrition: Attrition, windows: Sequence[AttritionWindow] = ()) -> list[CountTable]:
    """Tabulates rollouts by outcome, by length, by environment if there are several, and by window and environment;
    without rollouts there are no tables."""
    if not attrition.rollouts:
        return []
    every = _by_outcome(attrition)
    tables = [
        CountTable(
            "By outcome",
            [
                ["rollouts", "", "share", "tokens", "masked for lag", "mean length", "mean reward", "ended by"],
                _outcome_row("sampled", _sum(every.values()), _sum(every.values())),
                *(_outcome_row(name, counts, _sum(every.values())) for name, counts in every.items()),
            ],
        ),
        CountTable("By length", [["tokens, up to", "sampled", *OUTCOMES, "masked for lag"], *_length_rows(attrition)]),
    ]
    if len(attrition.rollouts) > 1:
        rows = [_compared_row(name, outcomes) for name, outcomes in sorted(attrition.by_environment().items())]
        tables.append(CountTable("By environment", [["environment", *_COMPARED], *rows]))
    if any(window.rollouts for window in windows):
        tables.append(CountTable("By window", [["updates", *_COMPARED], *_window_rows(windows)]))
    return tables


def attrition_lines(attrition: Attrition, num_open: int = 0) -> list[str]:
    """Returns what a reader must know to read the tables. num_open: groups released and not settled."""
    found = []
    if num_open:
        found.append(f"{num_open:,} groups are not settled: what was sampled of them is in no table")
    if attrition.num_tries_lost:
        found.append(
            f"{attrition.num_tries_lost:,} tries at groups ended with their producer and started again on another: "
            "what they had sampled is in no table, and long rollouts are the likelier to be among it"
        )
    test = attrition.last
    if test is not None:
        verdict = "long rollouts are lost at a rate that short ones are not" if test.is_alarm else "no sign of a bias"
        found.append(f"The last window of groups: {test}: {verdict}")
    return found


def attrition_figures(attrition: Attrition) -> dict[str, Any]:
    """Returns rollouts, tokens, mean length and mean reward by outcome, the lost tries, and the last window's
    comparison."""
    every = _by_outcome(attrition)
    return {
        "outcomes": {
            name: {
                "num_rollouts": counts.num,
                "num_tokens": counts.num_tokens,
                "num_tokens_masked_lag": counts.num_tokens_masked,
                "completion_tokens": mean_length(counts),
                "reward": mean_reward(counts),
                "finish_reasons": counts.finish_reasons,
            }
            for name, counts in {"sampled": _sum(every.values()), **every}.items()
        },
        "num_tries_lost": attrition.num_tries_lost,
        "lost_by_length": None if attrition.last is None else msgspec.to_builtins(attrition.last),
    }


def mean_length(counts: Rollouts) -> float | None:
    """Returns the mean length of the rollouts of known length: those with a finish reason."""
    return counts.num_tokens / num if (num := sum(counts.finish_reasons.values())) else None


def mean_reward(counts: Rollouts) -> float | None:
    return counts.reward_sum / counts.num_scored if counts.num_scored else None


def _sum(counts: Iterable[Rollouts]) -> Rollouts:
    return sum(counts, Rollouts())


def _grouped(counts: Iterable[tuple[str, str, Rollouts]]) -> dict[str, dict[str, Rollouts]]:
    """Sums counts by a key and an outcome."""
    found: dict[str, dict[str, Rollouts]] = {}
    for key, outcome, own in counts:
        outcomes = found.setdefault(key, {})
        outcomes[outcome] = outcomes.get(outcome, Rollouts()) + own
    return found


def _by_outcome(attrition: Attrition) -> dict[str, Rollouts]:
    outcomes = _grouped(("", outcome, counts) for _, outcome, _, counts in attrition.counts()).get("", {})
    return {name: outcomes[name] for name in OUTCOMES if name in outcomes}


def _outcome_row(name: str, counts: Rollouts, every: Rollouts) -> Cells:
    return [
        name,
        f"{counts.num:,}",
        _share(counts.num, every.num),
        f"{counts.num_tokens:,}",
        _share(counts.num_tokens_masked, counts.num_tokens),
        _shown(mean_length(counts), ",.1f"),
        _shown(mean_reward(counts), ".3f"),
        ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.finish_reasons.items())),
    ]


def _length_rows(attrition: Attrition) -> list[Cells]:
    by_length = _grouped((length, outcome, counts) for _, outcome, length, counts in attrition.counts())
    rows = []
    for length in [*sorted(by_length.keys() - {UNKNOWN}, key=float), *(by_length.keys() & {UNKNOWN})]:
        total = _sum(by_length[length].values())
        label = length if length == UNKNOWN else "more" if length == "+Inf" else f"{int(length):,}"
        masked = _share(total.num_tokens_masked, total.num_tokens)
        rows.append([label, f"{total.num:,}", *_shares(by_length[length], total), masked])
    return rows


def _compared_row(label: str, outcomes: Mapping[str, Rollouts]) -> Cells:
    total, trained = _sum(outcomes.values()), outcomes.get("trained", Rollouts())
    return [
        label,
        f"{total.num:,}",
        *_shares(outcomes, total),
        _share(total.num_tokens_masked, total.num_tokens),
        f"{_shown(mean_length(total), ',.1f')} → {_shown(mean_length(trained), ',.1f')}",
        f"{_shown(mean_reward(total), '.3f')} → {_shown(mean_reward(trained), '.3f')}",
        f"{_ends(total)} → {_ends(trained)}",
    ]


def _window_rows(windows: Sequence[AttritionWindow]) -> list[Cells]:
    """Returns a row for each window, and for each of its environments if it has several."""
    rows = []
    for first, last, rollouts in windows:
        label = f"{first:,} to {last:,}"
        every = _grouped(("", name, counts) for outcomes in rollouts.values() for name, counts in outcomes.items())
        rows.append(_compared_row(label, every.get("", {})))
        if len(rollouts) > 1:
            rows += [_compared_row(f"{label}: {name}", own) for name, own in sorted(rollouts.items())]
    return rows


def _ends(counts: Rollouts) -> str:
    """Returns each finish reason's share of the rollouts that have one."""
    num = sum(counts.finish_reasons.values())
    return ", ".join(f"{reason} {_share(count, num)}" for reason, count in sorted(counts.finish_reasons.items()))


def _shares(outcomes: Mapping[str, Rollouts], total: Rollouts) -> Cells:
    return [_share(outcomes[name].num if name in outcomes else 0, total.num) for name in OUTCOMES]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _shown(value: float | None, spec: str) -> str:
    return "" if value is None else f"{value:{spec}}"
