"""Computes the figures of a run for `summary.json`."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.deploy.report.attrition import attrition_figures
from penstock.deploy.report.lines import EvaluationPoint, Started, Update, WarmStartLine
from penstock.deploy.report.means import (
    MASKED,
    answered,
    group_seconds,
    lag_totals,
    masked_frac,
    mean_in_environment,
    mean_lag,
    metric_values,
    mismatch_by_lag,
    pauses_of,
    phase_seconds,
    sampled_tokens,
    slowest_groups,
)
from penstock.deploy.report.telemetry import RunTelemetry
from penstock.schemas.config import RunConfig
from penstock.schemas.metrics import REWARD, error_key, part_key, parts_of

COURSE_UPDATES = 20
"""Batches at the run's beginning, and at its end, over which `course` takes means; at most half of the run's."""
COURSE = ("reward", "reward_std", "completion_tokens", "truncated_frac")
LEDGER_FIGURES = (
    "num_groups_released",
    "num_groups_trained",
    "num_groups_skipped",
    "num_groups_dead",
    "num_groups_cancelled",
    "num_groups_released_again",
    "num_duplicates_dropped",
    "dead_reasons",
    "num_steps_skipped",
)


def summarize(telemetry: RunTelemetry) -> dict[str, Any]:
    """Computes the figures of one run. A figure whose file is missing is None, and `missing` names the file.

    Times are seconds. `wall_s` is from the first claimed prompt to the last update, and rates are over that time:
    tokens sampled by the producers (evaluations included), and tokens that reached the loss. Group counts are those of
    the trainer's ledger at its last checkpoint; token counts are those of the updates that led to the final policy.
    """
    ledger, config, points = telemetry.ledger, telemetry.config, telemetry.evaluations
    start_s, end_s = telemetry.start_s, telemetry.end_s
    wall_s = end_s - start_s if start_s is not None and end_s is not None and telemetry.updates else None
    tokens = token_counts(telemetry)
    phases = phase_seconds(telemetry.updates)
    return {
        "name": telemetry.name,
        "seed": config.seed if config else None,
        "mode": config.mode if config else None,
        "oldest_lag": config.oldest_lag if config else None,
        "finished": telemetry.is_over,
        "as_of_s": None if telemetry.is_over else telemetry.read_s,
        "last_update_s": end_s,
        "figure": config.evaluation.figure if config else REWARD,
        "held_out": held_out(points),
        "answered": answered(config),
        "num_evaluation_prompts": points[-1].num_prompts if points else None,
        "num_evaluation_failed": points[-1].num_failed if points else None,
        "goal": config.evaluation.goal.value if config and config.evaluation.goal else None,
        "ended_early": ledger.ended_early if ledger and telemetry.is_over else "",
        "goal_reached_s": goal_reached_s(points, config, start_s),
        "warm_start": warm_start(telemetry.warm_start),
        "course": course(telemetry.updates),
        "environments": by_environment(telemetry.updates, points),
        "wall_s": wall_s,
        "num_updates": telemetry.updates[-1].update if telemetry.updates else None,
        "updates_per_s": _ratio(len(telemetry.updates), wall_s),
        **{name: getattr(ledger, name) if ledger else None for name in LEDGER_FIGURES},
        "attrition": attrition_figures(ledger.attrition) if ledger and ledger.attrition.rollouts else None,
        **tokens,
        "trainer_tokens_per_s": _ratio(tokens["num_tokens_trained"], wall_s),
        "trainer_time_share": {phase: seconds / wall_s for phase, seconds in phases.items()} if wall_s else None,
        "group_s": group_seconds(telemetry.updates),
        "slowest_groups": [msgspec.to_builtins(group) for group in slowest_groups(telemetry.updates)],
        **_producer_figures(telemetry),
        **_engine(telemetry),
        "missing": list(telemetry.missing),
        "num_torn_lines": telemetry.num_torn_lines,
    }


def token_counts(telemetry: RunTelemetry) -> dict[str, Any]:
    """Counts tokens trained, masked for lag and rejected by the correction; takes tokens and mismatch by lag."""
    updates = telemetry.updates
    histogram, mismatches = lag_totals(updates), metric_values(updates, "mismatch_lag0")
    found = {
        "num_tokens_trained": sum(line.num_tokens_trained for line in updates),
        "num_tokens_masked_lag": sum(line.num_tokens_masked_lag for line in updates),
        "num_tokens_rejected": sum(line.num_tokens_rejected for line in updates),
        MASKED: masked_frac(updates),
        "lag_histogram": {str(lag): histogram[lag] for lag in sorted(histogram)},
        "mean_lag": mean_lag(histogram),
        "ess_fraction_min": min(metric_values(updates, "ess_fraction"), default=None),
        "mismatch_lag0": float(np.mean(mismatches)) if mismatches else None,
        "mismatch_by_lag": mismatch_by_lag(updates),
    }
    return found if updates else dict.fromkeys(found)


def held_out(points: Sequence[EvaluationPoint]) -> dict[str, dict[str, float]] | None:
    """Returns `initial`, `final` and `best` of `reward`, of each of its parts as `reward/<part>`, and of `pass@<k>`;
    also `final_se`, the standard error of the final value, if known. None without points."""
    if not points:
        return None
    found: dict[str, list[float]] = {}
    for point in points:
        for name, value in point.figures.items():
            found.setdefault(name, []).append(value)
    errors = {name: points[-1].metrics.get(error_key(name)) for name in found}
    return {
        name: {"initial": values[0], "final": values[-1], "best": max(values)}
        | ({} if (error := errors[name]) is None else {"final_se": error})
        for name, values in sorted(found.items())
    }


def goal_reached_s(points: Iterable[EvaluationPoint], config: RunConfig | None, start_s: float | None) -> float | None:
    """Returns the seconds from `start_s` to the first evaluation that reached the goal; None without one or a goal."""
    goal = config.evaluation.goal if config else None
    if goal is None or start_s is None:
        return None
    reached = (point for point in points if point.figures.get(goal.figure, -np.inf) >= goal.value)
    return next((point.time_s - start_s for point in reached), None)


def warm_start(steps: Sequence[WarmStartLine]) -> dict[str, float] | None:
    """Returns the steps of the warm start, their tokens and seconds, and `first` and `last` of its loss, means over the
    first and last tenth; None without one."""
    losses = [line.loss for line in steps if line.loss is not None]
    if not losses:
        return None
    count = max(1, len(losses) // 10)
    return {
        "num_steps": steps[-1].step,
        "num_tokens": sum(line.num_tokens for line in steps),
        "seconds": sum(line.step_s for line in steps),
        "first": float(np.mean(losses[:count])),
        "last": float(np.mean(losses[-count:])),
    }


def course(updates: Sequence[Update]) -> dict[str, dict[str, float]] | None:
    """Returns `first` and `last` of `COURSE` and of the reward's parts: means over batches; None without batches."""
    if not updates:
        return None
    count = max(1, min(COURSE_UPDATES, len(updates) // 2))
    parts = {part_key(name) for update in updates for name in parts_of(update.metrics)}
    found = {}
    for name in (*COURSE, *sorted(parts)):
        first, last = metric_values(updates[:count], name), metric_values(updates[-count:], name)
        if first and last:
            found[name] = {"first": float(np.mean(first)), "last": float(np.mean(last))}
    return found


def by_environment(updates: Sequence[Update], points: Sequence[EvaluationPoint]) -> dict[str, dict[str, Any]]:
    """Returns, by environment, the groups trained and skipped, the `course` of its rewards, its `held_out` rewards, and
    its `bias`: means over its tokens of all updates, None if not measured."""
    found: dict[str, dict[str, Any]] = {}
    lines: list[Update | EvaluationPoint] = [*updates, *points]
    for name in sorted({name for line in lines for name in line.environments}):
        own = [
            msgspec.structs.replace(line, metrics=line.environments[name])
            for line in updates
            if name in line.environments
        ]
        evaluated = [
            msgspec.structs.replace(point, reward=figures[REWARD], metrics=figures)
            for point in points
            if (figures := point.environments.get(name))
        ]
        groups = {each: int(sum(metric_values(own, each))) for each in ("num_groups_trained", "num_groups_skipped")}
        in_batches = [line for line in own if REWARD in line.metrics]
        bias = {key: mean_in_environment(updates, key, name) for key in ("lag_mean", "ess_fraction", "chi2", MASKED)}
        found[name] = {**groups, "course": course(in_batches), "held_out": held_out(evaluated), "bias": bias}
    return found


def _producer_figures(telemetry: RunTelemetry) -> dict[str, Any]:
    """Computes rates and pauses between the first prompt and the last update.

    A producer's rate is over the part of that time in which it ran; the total is over the whole time.
    """
    pause_names = ("pause_s_p50", "pause_s_p99", "pause_s_max", "num_weight_loads", "paused_share")
    start_s, end_s = telemetry.start_s, telemetry.end_s
    if not telemetry.producers or start_s is None or end_s is None:
        return dict.fromkeys(("producer_tokens_per_s", "num_tokens_sampled", *pause_names))
    by_producer: dict[str, float | None] = {}
    total_tokens = total_s = 0.0
    pauses = [pause_s for of_producer in pauses_of(telemetry).values() for pause_s in of_producer]
    for producer, events in telemetry.producers.items():
        times, tokens = sampled_tokens(events)
        begin, end = (max(start_s, times[0]), min(end_s, times[-1])) if len(times) else (0.0, 0.0)
        if end <= begin:
            by_producer[producer] = None
            continue
        num_tokens = float(np.interp(end, times, tokens) - np.interp(begin, times, tokens))
        by_producer[producer] = num_tokens / (end - begin)
        total_tokens += num_tokens
        total_s += end - begin
    return {
        "producer_tokens_per_s": {"total": _ratio(total_tokens, end_s - start_s), "by_producer": by_producer},
        "num_tokens_sampled": total_tokens,
        "pause_s_p50": _percentile(pauses, 50),
        "pause_s_p99": _percentile(pauses, 99),
        "pause_s_max": max(pauses, default=None),
        "num_weight_loads": len(pauses),
        "paused_share": _ratio(sum(pauses), total_s),
    }


def _engine(telemetry: RunTelemetry) -> dict[str, Any]:
    """Returns the first engine's fingerprint, and the producers whose engine has another one."""
    found = {
        producer: event.fingerprint
        for producer, events in telemetry.producers.items()
        for event in events
        if isinstance(event, Started)
    }
    first = next(iter(found.values()), None)
    return {
        "engine": msgspec.to_builtins(first) if first is not None else None,
        "engines_that_differ": [producer for producer, fingerprint in found.items() if fingerprint != first],
    }


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _percentile(values: Sequence[float], q: float) -> float | None:
    """Returns the q-th percentile, with linear interpolation; None without values."""
    return float(np.percentile(values, q)) if values else None
