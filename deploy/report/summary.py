"""Computes the figures of a run for `summary.json` and the table that ends `penstock run`."""

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from penstock.deploy.report.attrition import attrition_figures
from penstock.deploy.report.telemetry import (
    MASKED,
    EvaluationPoint,
    Rate,
    RunTelemetry,
    Started,
    Update,
    WeightsLoaded,
    lag_totals,
    masked_frac,
    mean_by_lag,
    mean_in_environment,
    mean_lag,
    metric_values,
    phase_seconds,
)
from penstock.schemas import limits
from penstock.schemas.attrition import LostByLength
from penstock.schemas.config import RunConfig
from penstock.schemas.metrics import LAG_LABELS, REWARD, error_key, figure_name, figures_of, lag_key, part_key, parts_of

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
NOTHING = "n/a"
NOTHING_LEARNED = (
    "the rewards within each group are equal (`penstock try RUN.toml` shows prompts, completions and rewards)"
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
        "lag_bound": config.lag_bound if config else None,
        "finished": telemetry.is_over,
        "as_of_s": None if telemetry.is_over else telemetry.read_s,
        "last_update_s": end_s,
        "figure": config.evaluation.figure if config else REWARD,
        "held_out": held_out(points),
        "answered": answered(config),
        "num_evaluation_prompts": points[-1].num_prompts if points else None,
        "num_evaluation_failed": points[-1].num_failed if points else None,
        "goal": config.evaluation.goal.value if config and config.evaluation.goal else None,
        "goal_reached_s": goal_reached_s(points, config, start_s),
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


def mismatch_by_lag(updates: Sequence[Update]) -> dict[str, dict[str, float]]:
    """Returns, by lag bucket, the run's tokens and the means of kl, k3_kl, chi2, weight_mean and masked_frac.

    Each is the mean over the bucket's tokens of all updates; metrics without a measurement are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for label in LAG_LABELS:
        num_tokens = sum(metric_values(updates, lag_key("num_tokens", label)))
        if num_tokens:
            found[label] = {"num_tokens": num_tokens}
        for name in ("kl", "k3_kl", "chi2", "weight_mean", MASKED):
            mean = mean_by_lag(updates, name, label)
            if mean is not None:
                found.setdefault(label, {})[name] = mean
    return found


def answered(config: RunConfig | None) -> str:
    """Says how held-out prompts are answered, for a label: `greedy`, or `avg@8` if all have 8 samples."""
    found = {(how.num_samples, bool(how.temperature)) for how in config.held_out.values()} if config else set()
    numbers = {number for number, _ in found}
    if not any(is_sampled for _, is_sampled in found):
        return "greedy"
    return f"avg@{numbers.pop()}" if len(numbers) == 1 else "sampled"


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


def sampled_tokens(events: Iterable[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a producer's cumulative token count over all its restarts: times `[n]` in seconds and tokens `[n]`."""
    times: list[float] = []
    tokens: list[int] = []
    base = last = 0
    for event in events:
        if isinstance(event, Rate):
            count = event.num_tokens
        elif isinstance(event, Started):
            count = 0
        else:
            continue
        if count < last:  # a new process counts from 0
            base += last
        last = count
        times.append(event.time_s)
        tokens.append(base + count)
    return np.array(times), np.array(tokens, dtype=float)


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


def pauses_of(telemetry: RunTelemetry) -> dict[str, list[float]]:
    """Returns, by producer, the seconds of its pauses between the first prompt and the last update."""
    start_s, end_s = telemetry.start_s or 0.0, telemetry.end_s or math.inf
    return {
        producer: [
            event.pause_s for event in events if isinstance(event, WeightsLoaded) and start_s <= event.time_s <= end_s
        ]
        for producer, events in telemetry.producers.items()
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


def masked_advice(share: float, waits: float) -> str:
    """Says which setting helps where many tokens are masked for their lag.

    share: of the sampled tokens those beyond the lag bound. waits: share of its time in which the trainer waits.
    """
    masked = f"{share:.0%} of the sampled tokens were masked for their lag (max_lag)"
    if waits < limits.WAITING:
        return f"{masked}: they wait for the trainer; lower producers.groups_in_flight (a larger max_lag does not help)"
    return f"{masked}: rollouts take longer than max_lag updates; raise max_lag or groups_per_batch"


def warnings_of(summary: dict[str, Any]) -> list[str]:
    """Returns what a reader must not overlook: most groups skipped, dead groups, many tokens masked, lost long groups,
    failed held-out prompts."""
    trained, skipped, dead = (summary[f"num_groups_{what}"] or 0 for what in ("trained", "skipped", "dead"))
    failed, asked = summary["num_evaluation_failed"], summary["num_evaluation_prompts"]
    found = []
    if skipped > trained:
        found.append(f"{skipped:,} of {trained + skipped:,} groups trained nothing: {NOTHING_LEARNED}")
    if dead:
        total = trained + skipped + dead
        found.append(f"{dead:,} of {total:,} groups died: `penstock dead list {summary['name']}` says of what")
    total, phases = sum((summary["lag_histogram"] or {}).values()), summary["trainer_time_share"] or {}
    if total and (share := summary["num_tokens_masked_lag"] / total) > limits.BEYOND_BOUND:
        found.append(masked_advice(share, phases.get("wait", 0.0)))
    test = (summary["attrition"] or {}).get("lost_by_length")
    if test is not None and (test := msgspec.convert(test, LostByLength)).is_alarm:
        found.append(f"long rollouts are lost at a rate that short ones are not: {test}")
    if failed:
        found.append(f"{failed} of {asked} held-out prompts failed in the last evaluation, each counts as 0: see logs")
    return found


def summary_table(summary: dict[str, Any]) -> Table:
    """Returns the figures of a summary as one table."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, title_justify="left")
    table.title = f"Run {summary['name']}".replace("[", r"\[")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in table_rows(summary):
        table.add_row(label, value.replace("[", r"\["))
    return table


def table_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, value) pairs for a reader; `n/a` for a missing figure."""
    s = summary
    groups = [f"{shown(s[f'num_groups_{what}'])} {what}" for what in ("trained", "skipped", "dead", "cancelled")]
    rates = s["producer_tokens_per_s"] or {"total": None, "by_producer": {}}
    by_producer = ", ".join(f"{name} {shown(rate)}" for name, rate in rates["by_producer"].items())
    share = s["trainer_time_share"] or {}
    time_shares = ", ".join(f"{phase} {value:.0%}" for phase, value in share.items())
    engine = s["engine"] or {}
    rows = [
        *([("state", not_over(s))] if not s["finished"] else []),
        ("held-out reward", _rewards(s["held_out"], "initial", "final")),
        *([("goal", _goal(s))] if s["goal"] is not None else []),
        ("reward", _rewards(s["course"], "first", "last")),
        *(
            (
                f"  {name}",
                f"{_rewards(own['course'], 'first', 'last')}; "
                f"held-out {_rewards(own['held_out'], 'initial', 'final')}; "
                f"{own['num_groups_trained']:,} groups trained, {own['num_groups_skipped']:,} skipped; "
                f"lag {shown(own['bias']['lag_mean'], '.2f')}, ESS {shown(own['bias']['ess_fraction'], '.3f')}, "
                f"χ² {shown(own['bias']['chi2'], '.2g')}, {shown(own['bias'][MASKED], '.1%')} masked",
            )
            for name, own in s["environments"].items()
            if len(s["environments"]) > 1
        ),
        ("its spread", f"{_change(s, 'reward_std', '.3f')} standard deviation within a group"),
        (
            "completions",
            f"{_change(s, 'completion_tokens', ',.1f')} tokens, {_change(s, 'truncated_frac', '.1%')} truncated",
        ),
        (
            "updates",
            f"{shown(s['num_updates'])} in {shown(s['wall_s'], ',.1f', ' s')}, {shown(s['updates_per_s'], '.3f')}/s",
        ),
        ("groups", f"{shown(s['num_groups_released'])} released: " + ", ".join(groups)),
        *([("rollouts", _rollouts(s["attrition"]["outcomes"]))] if s["attrition"] else []),
        ("tokens trained", f"{shown(s['num_tokens_trained'])}, {shown(s['trainer_tokens_per_s'])}/s"),
        ("tokens by lag", lag_shares(s["lag_histogram"], s["lag_bound"])),
        (
            "tokens masked",
            f"{shown(s[MASKED], '.1%')}: {shown(s['num_tokens_masked_lag'])} for their lag, "
            f"{shown(s['num_tokens_rejected'])} rejected by the importance correction",
        ),
        ("k3 KL by lag", _by_lag(s["mismatch_by_lag"], "k3_kl")),
        ("χ² by lag", _by_lag(s["mismatch_by_lag"], "chi2")),
        ("tokens sampled", f"{shown(rates['total'])}/s" + (f"  ({by_producer})" if by_producer else "")),
        ("trainer's time", time_shares or NOTHING),
        (
            "pauses",
            f"{shown(s['pause_s_p50'], '.1f', ' ms', scale=1000)} p50, "
            f"{shown(s['pause_s_p99'], '.1f', ' ms', scale=1000)} p99, "
            f"{shown(s['num_weight_loads'])} weight loads, {shown(s['paused_share'], '.1%')} of the time",
        ),
        ("engine", f"{engine.get('engine', NOTHING)} {engine.get('version', '')}".strip()),
        ("seed", str(s["seed"]) if s["seed"] is not None else NOTHING),
    ]
    if s["missing"]:
        rows.append(("missing", ", ".join(s["missing"])))
    return rows


def _rollouts(outcomes: dict[str, dict[str, Any]]) -> str:
    """`800 sampled: 61.2% trained, 38.8% skipped; 7.9 tokens on average, 8.1 of those trained`."""
    total = outcomes["sampled"]["num_rollouts"]
    parts = [f"{of['num_rollouts'] / total:.1%} {name}" for name, of in outcomes.items() if name != "sampled"]
    lengths = [outcomes.get(name, {}).get("completion_tokens") for name in ("sampled", "trained")]
    sampled, trained = (shown(length, ",.1f") for length in lengths)
    return f"{total:,} sampled: {', '.join(parts)}; {sampled} tokens on average, {trained} of those trained"


def _rewards(found: dict[str, dict[str, float]] | None, begin: str, end: str) -> str:
    """`0.372 → 0.981 ± 0.009 (exact 0.372 → 0.981)`."""
    if not found or REWARD not in found:
        return NOTHING
    errors = {name: of.get(f"{end}_se") for name, of in found.items()}
    changes = {
        name: f"{of[begin]:.3f} → {of[end]:.3f}" + (f" ± {errors[name]:.3f}" if errors[name] is not None else "")
        for name, of in found.items()
    }
    parts = ", ".join(f"{figure_name(name)} {change}" for name, change in figures_of(changes).items() if name != REWARD)
    return changes[REWARD] + (f"  ({parts})" if parts else "")


def _goal(summary: dict[str, Any]) -> str:
    s, figure = summary, summary["figure"]
    goal = f"{figure} {s['goal']:g} "
    if s["goal_reached_s"] is not None:
        return f"{goal}after {s['goal_reached_s']:,.1f} s"
    if s["held_out"] and figure not in s["held_out"]:
        return f"{goal}is never reached: evaluations have {', '.join(s['held_out'])}"
    return f"{goal}not reached"


def _change(summary: dict[str, Any], name: str, spec: str) -> str:
    """`0.31 → 0.05`, of one number of `course`."""
    found = (summary["course"] or {}).get(name)
    return f"{found['first']:{spec}} → {found['last']:{spec}}" if found else NOTHING


def not_over(summary: dict[str, Any]) -> str:
    """`not over, as of 2026-11-21 20:34:16 UTC; the last update was 3 s before`; for a summary that is not finished."""
    last_s, as_of_s = summary["last_update_s"], summary["as_of_s"]
    update = f"the last update was {as_of_s - last_s:,.0f} s before" if last_s is not None else "no update yet"
    return f"not over, as of {datetime.fromtimestamp(as_of_s, UTC):%Y-%m-%d %H:%M:%S} UTC; {update}"


def lag_shares(histogram: dict[str, int] | None, bound: int | None) -> str:
    """`0: 12%, 1: 63%, 2: 24%, 3: 1% (masked)`, with a bound of 2."""
    total = sum((histogram or {}).values())
    if not histogram or not total:
        return NOTHING
    beyond = {lag for lag in histogram if bound is not None and int(lag) > bound}
    return ", ".join(
        f"{lag}: {count / total:.1%}" + (" (masked)" if lag in beyond else "") for lag, count in histogram.items()
    )


def _by_lag(found: dict[str, dict[str, float]] | None, name: str) -> str:
    """`0: 1.2e-09, 1: 0.00031, 2-3: 0.0011`."""
    values = {label: bucket[name] for label, bucket in (found or {}).items() if name in bucket}
    return ", ".join(f"{label}: {value:.2g}" for label, value in values.items()) or NOTHING


def shown(value: float | None, spec: str = ",.0f", unit: str = "", *, scale: float = 1.0) -> str:
    """Formats a figure for a reader; `n/a` if it is None."""
    return NOTHING if value is None else f"{value * scale:{spec}}{unit}"
