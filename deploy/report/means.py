"""Numbers of several lines: sums, means over tokens, shares."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.deploy.report.lines import Rate, SlowGroup, Started, Update, WeightsLoaded
from penstock.deploy.report.telemetry import RunTelemetry
from penstock.schemas.config import RunConfig
from penstock.schemas.metrics import LAG_LABELS, lag_key, lag_label

PHASES = ("wait", "step", "publish")
"""Parts of the trainer's time; an update has the seconds of each."""
MASKED = "masked_frac"
NUM_SLOWEST = 10
"""Groups that a report lists."""


def metric_values(updates: Iterable[Update], name: str) -> list[float]:
    """Returns a metric of the updates that have it."""
    return [line.metrics[name] for line in updates if name in line.metrics]


def phase_seconds(updates: Sequence[Update]) -> dict[str, float]:
    """Returns the trainer's seconds in each of `PHASES`."""
    return {phase: sum(getattr(line, f"{phase}_s") or 0.0 for line in updates) for phase in PHASES}


def group_seconds(updates: Sequence[Update]) -> dict[str, float] | None:
    """Returns the mean seconds of a group by phase, from its release to the policy that it made; None without any."""
    found: dict[str, list[float]] = {}
    for line in updates:
        for phase, seconds in line.group_s.items():
            found.setdefault(phase, []).append(seconds)
    return {phase: sum(values) / len(values) for phase, values in found.items()} or None


def slowest_groups(updates: Sequence[Update]) -> list[SlowGroup]:
    """Returns the slowest groups of the run."""
    slow = (group for line in updates for group in line.slowest_groups)
    return sorted(slow, key=lambda group: group.total_s, reverse=True)[:NUM_SLOWEST]


def lag_totals(updates: Iterable[Update]) -> Counter[int]:
    """Counts the tokens of all updates by lag."""
    totals: Counter[int] = Counter()
    for line in updates:
        totals.update(line.lag_histogram)
    return totals


def mean_lag(histogram: Mapping[int, int]) -> float | None:
    """Returns the mean over tokens, of their numbers by lag; None without tokens."""
    total = sum(histogram.values())
    return sum(lag * count for lag, count in histogram.items()) / total if total else None


def tokens_by_lag(update: Update) -> dict[str, int]:
    """Returns the sampled tokens of a batch by lag bucket, masked ones included."""
    counts = dict.fromkeys(LAG_LABELS, 0)
    for lag, num_tokens in update.lag_histogram.items():
        counts[lag_label(lag)] += num_tokens
    mixed = min(round(update.metrics.get(lag_key("num_tokens", "0-mixed"), 0)), counts["0"])
    return counts | {"0": counts["0"] - mixed, "0-mixed": mixed}


def mean_by_lag(updates: Sequence[Update], name: str, label: str) -> float | None:
    """Returns the mean of a metric over the tokens of one lag bucket: `masked_frac` over all that were sampled, others
    over those within the lag bound. None if no batch has it."""
    within = lag_key("num_tokens", label)
    return _weighted(
        (
            update.metrics.get(lag_key(name, label)),
            tokens_by_lag(update)[label] if name == MASKED else update.metrics.get(within, 0.0),
        )
        for update in updates
    )


def mean_in_environment(updates: Sequence[Update], name: str, environment: str) -> float | None:
    """Returns the same over the tokens of one environment; also of `lag_mean`, over all that were sampled."""
    own = [update.environments[environment] for update in updates if environment in update.environments]
    of = "num_tokens_sampled" if name in (MASKED, "lag_mean") else "num_tokens"
    return _weighted((measured.get(name), measured.get(of, 0.0)) for measured in own)


def masked_frac(updates: Sequence[Update]) -> float | None:
    """Returns the share of sampled tokens that were masked, for their lag or by the correction; None if no batch has
    it."""
    return _weighted((update.metrics.get(MASKED), update.num_tokens_sampled) for update in updates)


def masked_lag_frac(updates: Sequence[Update]) -> float | None:
    """Returns the share of sampled tokens that were masked for their lag; None without tokens."""
    total = sum(update.num_tokens_sampled for update in updates)
    return sum(update.num_tokens_masked_lag for update in updates) / total if total else None


def _weighted(values: Iterable[tuple[float | None, float]]) -> float | None:
    """Returns the mean of values by their weights, without those that are None; None without weight."""
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


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


def pauses_of(telemetry: RunTelemetry) -> dict[str, list[float]]:
    """Returns, by producer, the seconds of its pauses between the first prompt and the last update."""
    start_s, end_s = telemetry.start_s or 0.0, telemetry.end_s or math.inf
    return {
        producer: [
            event.pause_s for event in events if isinstance(event, WeightsLoaded) and start_s <= event.time_s <= end_s
        ]
        for producer, events in telemetry.producers.items()
    }


def answered(config: RunConfig | None) -> str:
    """Says how held-out prompts are answered, for a label: `greedy`, or `avg@8` if all have 8 samples."""
    found = {(how.num_samples, bool(how.temperature)) for how in config.held_out.values()} if config else set()
    numbers = {number for number, _ in found}
    if not any(is_sampled for _, is_sampled in found):
        return "greedy"
    return f"avg@{numbers.pop()}" if len(numbers) == 1 else "sampled"
