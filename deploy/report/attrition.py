"""What was sampled and what was trained, as tables for the report and `penstock audit`."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.deploy.report.telemetry import Update
from penstock.schemas.attrition import OUTCOMES, UNKNOWN, Attrition, Rollouts

NUM_WINDOWS = 4
"""Parts of the run, of as many updates each, that the report compares."""
Cells = list[str]


class CountTable(NamedTuple):
    """rows: the header first."""

    title: str
    rows: list[Cells]


def attrition_tables(attrition: Attrition, updates: Sequence[Update] = ()) -> list[CountTable]:
    """Rollouts by outcome, by length, by environment if there are several, and by window of updates; without rollouts
    none."""
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
        header = ["environment", "sampled", *OUTCOMES, "length, sampled → trained", "reward, sampled → trained"]
        rows = [_environment_row(name, attrition) for name in sorted(attrition.rollouts)]
        tables.append(CountTable("By environment", [header, *rows]))
    if any(line.rollouts for line in updates):
        header = ["updates", "sampled", *OUTCOMES, "length, sampled → trained"]
        tables.append(CountTable("By window", [header, *_window_rows(updates)]))
    return tables


def attrition_lines(attrition: Attrition, num_open: int = 0) -> list[str]:
    """What a reader must know beside the tables. num_open: groups released and not settled."""
    found = []
    if num_open:
        found.append(f"{num_open:,} groups are not settled: what was sampled of them is in no table")
    if attrition.num_tries_lost:
        found.append(
            f"{attrition.num_tries_lost:,} tries at groups ended with their producer and began anew on another: what "
            "they had sampled is in no table, and a long rollout is the likelier to be among it"
        )
    test = attrition.last
    if test is not None:
        verdict = "long rollouts are lost at a rate that short ones are not" if test.is_alarm else "no sign of a bias"
        found.append(f"The last window of groups: {test} (p = {test.p_value:.1g}): {verdict}")
    return found


def attrition_figures(attrition: Attrition) -> dict[str, Any]:
    """By outcome rollouts, tokens, means of length and reward; tries lost, and the test of the last window."""
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
        "length_test": None if attrition.last is None else msgspec.to_builtins(attrition.last),
    }


def mean_length(counts: Rollouts) -> float | None:
    """Of the rollouts of known length, which are those that ended for a reason."""
    return counts.num_tokens / num if (num := sum(counts.finish_reasons.values())) else None


def mean_reward(counts: Rollouts) -> float | None:
    return counts.reward_sum / counts.num_scored if counts.num_scored else None


def _sum(counts: Iterable[Rollouts]) -> Rollouts:
    return sum(counts, Rollouts())


def _by_outcome(attrition: Attrition) -> dict[str, Rollouts]:
    found: dict[str, Rollouts] = {}
    for _, outcome, _, counts in attrition.counts():
        found[outcome] = found.get(outcome, Rollouts()) + counts
    return {name: found[name] for name in OUTCOMES if name in found}


def _outcome_row(name: str, counts: Rollouts, every: Rollouts) -> Cells:
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.finish_reasons.items()))
    return [
        name,
        f"{counts.num:,}",
        _share(counts.num, every.num),
        f"{counts.num_tokens:,}",
        _share(counts.num_tokens_masked, counts.num_tokens),
        _shown(mean_length(counts), ",.1f"),
        _shown(mean_reward(counts), ".3f"),
        reasons,
    ]


def _length_rows(attrition: Attrition) -> list[Cells]:
    by_length: dict[str, dict[str, Rollouts]] = {}
    for _, outcome, length, counts in attrition.counts():
        own = by_length.setdefault(length, {})
        own[outcome] = own.get(outcome, Rollouts()) + counts
    rows = []
    for length in [*sorted(by_length.keys() - {UNKNOWN}, key=float), *(by_length.keys() & {UNKNOWN})]:
        total = _sum(by_length[length].values())
        label = length if length == UNKNOWN else "more" if length == "+Inf" else f"{int(length):,}"
        masked = _share(total.num_tokens_masked, total.num_tokens)
        rows.append([label, f"{total.num:,}", *_shares(by_length[length], total), masked])
    return rows


def _environment_row(name: str, attrition: Attrition) -> Cells:
    outcomes = {outcome: _sum(by_length.values()) for outcome, by_length in attrition.rollouts[name].items()}
    total, trained = _sum(outcomes.values()), outcomes.get("trained", Rollouts())
    return [
        name,
        f"{total.num:,}",
        *_shares(outcomes, total),
        f"{_shown(mean_length(total), ',.1f')} → {_shown(mean_length(trained), ',.1f')}",
        f"{_shown(mean_reward(total), '.3f')} → {_shown(mean_reward(trained), '.3f')}",
    ]


def _window_rows(updates: Sequence[Update]) -> list[Cells]:
    size = -(-len(updates) // NUM_WINDOWS)
    rows = []
    for start in range(0, len(updates), size):
        part = updates[start : start + size]
        num, known, tokens = (dict.fromkeys(OUTCOMES, 0) for _ in range(3))
        for line in part:
            for outcome, by_length in line.rollouts.items():
                for length, (count, num_tokens) in by_length.items():
                    num[outcome] += count
                    known[outcome] += count * (length != UNKNOWN)
                    tokens[outcome] += num_tokens
        total, num_known = sum(num.values()), sum(known.values())
        sampled = sum(tokens.values()) / num_known if num_known else None
        trained = tokens["trained"] / known["trained"] if known["trained"] else None
        rows.append(
            [
                f"{part[0].update:,} to {part[-1].update:,}",
                f"{total:,}",
                *(_share(num[name], total) for name in OUTCOMES),
                f"{_shown(sampled, ',.1f')} → {_shown(trained, ',.1f')}",
            ]
        )
    return rows


def _shares(outcomes: dict[str, Rollouts], total: Rollouts) -> Cells:
    return [_share(outcomes[name].num if name in outcomes else 0, total.num) for name in OUTCOMES]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _shown(value: float | None, spec: str) -> str:
    return "" if value is None else f"{value:{spec}}"
