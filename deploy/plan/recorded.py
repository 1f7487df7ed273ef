"""Reads the pace and the course of a past run from its record of rollouts and its telemetry."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, dropwhile, pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.consumers.stream.reader import group_versions
from penstock.deploy.plan.producer import ALONE, STEADY, EngineSpeed, RunPace, SpeedCourse, seats
from penstock.deploy.plan.simulation import Course
from penstock.deploy.plan.workload import Lengths, of_buckets, of_groups
from penstock.deploy.report.summary import sampled_tokens
from penstock.deploy.report.telemetry import (
    Rate,
    RunTelemetry,
    Update,
    WeightsLoaded,
    lag_totals,
    metric_values,
    read_telemetry,
)
from penstock.schemas.attrition import Attrition
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.metrics import LENGTH_BUCKETS
from penstock.schemas.policy import split_version
from penstock.schemas.record import FOLDER, RecordReadError
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import RecordError, Timings

FEWEST_PAIRS = 2
_BEYOND = 2 * int(LENGTH_BUCKETS[-1])
SHORTEST_STRETCH_S = 1.0
"""The shortest time over which a factor of an engine's speed is measured."""
_PRIOR_SHARE = 0.1
_ROUNDING = 1e-9
_DRAWS = 200
_SIGNIFICANT_F = 10.0
"""A value of F with one degree of freedom that chance exceeds about once in a hundred times."""


class _Sampled(NamedTuple):
    """One recorded group, and the lengths of its siblings. began_s: when it was claimed, or when the weights that
    sampled its first token were loaded if that was later, since it waited for them."""

    producer_id: str
    timings: Timings
    began_s: float
    lengths: tuple[int, ...]
    is_flat: bool

    @property
    def seconds(self) -> float:
        """From `began_s` to its last token."""
        return max(1e-6, self.timings.generated_s - self.began_s)


class PacedRun(NamedTuple):
    """A past run. clock_notes: on producers whose clocks differed from the trainer's."""

    config: RunConfig
    num_producers: int
    pace: RunPace
    lengths: Lengths
    course: Course
    clock_notes: tuple[str, ...] = ()

    def thinned(self, parts: int) -> "PacedRun":
        """Keeps the pace of every nth update, as if the run had been n times shorter; `parts` is n."""
        factors, joins_s = self.pace.update_factors[::parts], tuple(at_s / parts for at_s in self.pace.joins_s)
        courses = tuple(course._replace(each_s=course.each_s / parts) for course in self.pace.speed_courses)
        changed = {"update_factors": factors, "joins_s": joins_s, "speed_courses": courses}
        return self._replace(pace=msgspec.structs.replace(self.pace, **changed))


def read_run(folder: Path) -> PacedRun:
    """Reads a run's pace and course from its folder: from its record of rollouts if it has one, else from telemetry
    alone.

    Raises:
        ConfigError: no run file, a record that cannot be read, or too little data.
        TelemetryError: a malformed line.
    """
    telemetry = read_telemetry(folder)
    try:
        sampled = list(_sampled(Record(folder), telemetry)) if (folder / FOLDER).is_dir() else []
    except (RecordReadError, RecordError) as error:
        raise ConfigError(str(error)) from None
    config, pairs, buckets = telemetry.config, _pairs(telemetry), _buckets(telemetry)
    presence = _presence(sampled, telemetry)
    if config is None or len(pairs) < FEWEST_PAIRS or not presence or not (sampled or buckets):
        num_rollouts = sum(num for num, _, _ in buckets)
        raise ConfigError(
            f"{folder}: a run file: {'no' if config is None else 'yes'}, {len(pairs)} updates after another one, "
            f"{len(presence)} producers, {len(sampled)} recorded groups, {num_rollouts} rollouts counted: expected a "
            f"run file, {FEWEST_PAIRS} such updates or more, a producer, and groups or counts of rollouts by length"
        )
    if sampled:
        lengths = of_groups([group.lengths for group in sampled])
        speed, courses = _speed(sampled, telemetry)
    else:
        lengths, courses = of_buckets(buckets), (STEADY,)
        speed = _speed_logged(telemetry, config, lengths)
    loads, joins_s = list(_loads(telemetry)), _joins_s(presence)
    update_s, token_s, factors = _update_pace(telemetry)
    pace = RunPace(
        speed=speed,
        speed_courses=courses,
        update_s=update_s,
        token_s=token_s,
        update_factors=factors,
        announce_s=_announce_s(telemetry),
        load_s=median(load_s for _, load_s in loads) if loads else 0.0,
        pause_s=fmean(event.pause_s for event, _ in loads) if loads else 0.0,
        reward_s=tuple(max(0.0, group.timings.appended_s - group.timings.generated_s) for group in sampled) or (0.0,),
        flat=fmean(group.is_flat for group in sampled) if sampled else _flat_logged(telemetry),
        joins_s=joins_s,
    )
    return PacedRun(config, len(joins_s), pace, lengths, _course(telemetry), tuple(telemetry.clock_notes()))


def _sampled(record: Record, telemetry: RunTelemetry) -> Iterator[_Sampled]:
    """Yields the groups that were sampled completely. Raises RecordReadError as `Record.batch` does."""
    loaded_s: dict[tuple[str, int], float] = {}
    for name, events in telemetry.producers.items():
        for event in events:
            if isinstance(event, WeightsLoaded):
                loaded_s.setdefault((name, event.policy_version), event.time_s)
    for batch in record.batches:
        head, groups = record.batch(batch)
        for entry, recorded in zip(head.groups, groups, strict=True):
            if entry.outcome in ("trained", "skipped"):
                group = recorded.decode()
                name = group.producer_id
                times = _moved(group.timings, telemetry.clocks.get(name, 0.0))
                lengths = tuple(max(1, rollout.num_sampled_tokens) for rollout in group.rollouts)
                oldest = min(group_versions(group), default=-1)
                began_s = min(max(times.claimed_s, loaded_s.get((name, oldest), 0.0)), times.generated_s)
                yield _Sampled(name, times, began_s, lengths, not any(entry.advantages))


def _moved(times: Timings, ahead_s: float) -> Timings:
    """Corrects times to the trainer's clock; 0 means unknown."""
    fields = msgspec.structs.asdict(times)
    return Timings(**{name: at_s - ahead_s if at_s else 0.0 for name, at_s in fields.items()})


def _presence(sampled: Sequence[_Sampled], telemetry: RunTelemetry) -> list[tuple[float, float]]:
    """Returns the first and last time of each producer, from its events since its first weights, or from its groups."""
    times: dict[str, list[float]] = {}
    for name, events in telemetry.producers.items():
        served = dropwhile(lambda event: not isinstance(event, WeightsLoaded), events)
        times[name] = [event.time_s for event in served]
    if not any(times.values()):
        for group in sampled:
            times.setdefault(group.producer_id, []).extend((group.timings.claimed_s, group.timings.generated_s))
    return [(min(found), max(found)) for found in times.values() if found]


def _joins_s(presence: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Returns the seconds from the first producer's start until one, two, three and so on were there at once; one that
    replaces another does not count as a second."""
    changes = sorted((at_s, step) for span in presence for at_s, step in zip(span, (1, -1), strict=True))
    joins_s: list[float] = []
    for (at_s, step), num in zip(changes, accumulate(step for _, step in changes), strict=True):
        if step > 0 and num > len(joins_s):
            joins_s.append(at_s - changes[0][0])
    return tuple(joins_s)


def _speed(sampled: Sequence[_Sampled], telemetry: RunTelemetry) -> tuple[EngineSpeed, tuple[SpeedCourse, ...]]:
    """Fits the seconds of a decoding step to the sequences in flight, and returns each producer's changes of speed.

    The seconds: non-negative least squares over the seconds of groups, then scaled so that the sequences in flight
    account for all tokens. The changes: in each stretch of time, the tokens sampled divided by those that the fit
    expects.

    A sibling is assumed to have ended when its share of the longest one's tokens was sampled. Evaluations and stale
    groups are not in the record: the sequences in flight are scaled up by the ratio of all sampled tokens to recorded
    ones, between the first of the groups and the last. Time in which the engine was paused does not count.
    """
    unseen, sampling = _unseen(sampled, telemetry), 1 - _paused(telemetry)
    by_producer: dict[str, list[_Sampled]] = {}
    for group in sampled:
        by_producer.setdefault(group.producer_id, []).append(group)
    rows: list[tuple[float, float]] = []
    seconds: list[float] = []
    spans: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for groups in by_producer.values():
        lengths = np.array([length for group in groups for length in group.lengths])
        starts = np.array([group.began_s for group in groups for _ in group.lengths])
        took_s = np.array([group.seconds * each / max(group.lengths) for group in groups for each in group.lengths])
        times_s = np.concatenate([starts, starts + took_s])
        order = np.argsort(times_s)
        times_s, passed_s = times_s[order], np.diff(times_s[order])
        ones, rates = np.ones_like(starts), lengths / took_s
        num, tokens_per_s = (unseen * np.cumsum(np.r_[each, -each][order])[:-1] for each in (ones, rates))
        spans.append((times_s, num, tokens_per_s * passed_s))
        area = np.r_[0.0, np.cumsum(num * passed_s)]
        for group in groups:
            first, last = np.interp([group.began_s, group.timings.generated_s], times_s, area)
            rows.append((max(group.lengths), max(group.lengths) * (last - first) / group.seconds))
            seconds.append(group.seconds * sampling)
    (base_s, sequence_s), _ = _least_squares(np.array(rows), np.array(seconds))
    expected = [
        sampling * np.diff(times_s) * num / (base_s + np.maximum(num, _ROUNDING) * sequence_s)
        for times_s, num, _ in spans
    ]
    scale = float(sum(map(np.sum, expected)) / sum(np.sum(tokens) for _, _, tokens in spans))
    each_s = max(SHORTEST_STRETCH_S, median(group.seconds for group in sampled))
    edges = np.arange(min(each[0][0] for each in spans), max(each[0][-1] for each in spans) + each_s, each_s)
    courses = []
    for (times_s, _, tokens), at_most in zip(spans, expected, strict=True):
        counts = (np.r_[0.0, np.cumsum(each)] for each in (tokens, at_most / scale))
        found, of = (np.diff(np.interp(edges, times_s, count)) for count in counts)
        prior = _PRIOR_SHARE * np.mean(of)  # keeps a factor near 1 where little was in flight
        courses.append(SpeedCourse(tuple(((found + prior) / (of + prior)).tolist()), each_s))
    return EngineSpeed(base_s * scale, sequence_s * scale), tuple(courses)


def _unseen(sampled: Sequence[_Sampled], telemetry: RunTelemetry) -> float:
    """Returns the ratio of all tokens that producers sampled to those of recorded groups, between the end of the first
    of these and that of the last: what was sampled later was never trained."""
    ends_s = [group.timings.generated_s for group in sampled]
    within = min(ends_s), max(ends_s)
    recorded = sum(sum(group.lengths) for group in sampled if within[0] < group.timings.generated_s)
    counts = [sampled_tokens(events) for events in telemetry.producers.values()]
    counted = sum(np.interp(within, times_s, tokens) @ (-1, 1) for times_s, tokens in counts if len(times_s))
    return max(1.0, float(counted) / recorded) if recorded else 1.0


def _speed_logged(telemetry: RunTelemetry, config: RunConfig, lengths: Lengths) -> EngineSpeed:
    """Estimates the seconds of a step without recorded groups: the groups that producers had in flight, from heartbeat
    to heartbeat, account for all tokens that they counted, and a sequence alone is `ALONE` times as fast as with all
    seats taken.

    The share of a group's sequences that are in flight is taken to be its mean length divided by its largest.
    """
    random, num_seats = Random(0), seats(config)
    drawn = [lengths(random, config.group_size) for _ in range(_DRAWS)]
    width = sum(map(sum, drawn)) / sum(map(max, drawn))
    shape = EngineSpeed.of(1.0, min(1.0, ALONE / num_seats), num_seats)
    num_tokens = expected = 0.0
    for events in telemetry.producers.values():
        for before, after in pairwise(event for event in events if isinstance(event, Rate)):
            num = min(num_seats, width * ((before.in_flight or 0) + (after.in_flight or 0)) / 2)
            expected += (after.time_s - before.time_s) * num * shape.tokens_per_s(num)
            num_tokens += max(0, after.num_tokens - before.num_tokens)
    if not expected or not num_tokens:
        raise ConfigError(
            f"{telemetry.name}: {num_tokens:,.0f} tokens between heartbeats in the logs of its producers, "
            f"{expected:,.0f} sequence-seconds: expected a longer run, or one with record = true"
        )
    scale = expected * (1 - _paused(telemetry)) / num_tokens
    return EngineSpeed(shape.base_s * scale, shape.sequence_s * scale)


def _least_squares(rows: np.ndarray, values: np.ndarray) -> tuple[list[float], float]:
    """Returns the factors of the two columns, none below 0 and not both 0, and the sum of squared residuals."""
    best, least = [0.0, 0.0], math.inf
    for columns in ((0, 1), (0,), (1,)):
        found = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
        error = float(((rows[:, columns] @ found - values) ** 2).sum())
        if found.min() >= 0 and found[-1] > 0 and error < least * (1 - 1e-9):
            best, least = [0.0, 0.0], error
            for column, factor in zip(columns, found.tolist(), strict=True):
                best[column] = factor
    return best, least


def _update_pace(telemetry: RunTelemetry) -> tuple[float, float, tuple[float, ...]]:
    """Fits the seconds of an update and of a sampled token with least squares; returns these, and each update's time as
    a factor of the fit.

    The first update of each trainer and waits for groups are left out. The constant part is kept only if the fit is
    significantly worse without it (F test), since batches may be all of one size.
    """
    found = [
        (sum(update.lag_histogram.values()), max(0.0, update.time_s - before.time_s - (update.wait_s or 0.0)))
        for before, update in _pairs(telemetry)
    ]
    tokens, seconds = np.array(found).T
    rows = np.column_stack([np.ones_like(tokens), tokens])
    (update_s, token_s), least = _least_squares(rows, seconds)
    alone = float(tokens @ seconds / (tokens @ tokens))
    without = float(((alone * tokens - seconds) ** 2).sum())
    if (without - least) * (len(seconds) - 2) <= _SIGNIFICANT_F * least:
        update_s, token_s = 0.0, alone
    taken = update_s + token_s * tokens
    return update_s, token_s, tuple((seconds / np.where(taken > 0, taken, 1.0)).tolist())


def _pairs(telemetry: RunTelemetry) -> list[tuple[Update, Update]]:
    """Returns consecutive updates of one trainer, the later one of a batch with tokens."""
    return [
        (before, update)
        for before, update in pairwise(telemetry.updates)
        if update.lag_histogram and split_version(before.policy_version)[0] == split_version(update.policy_version)[0]
    ]


def _course(telemetry: RunTelemetry) -> Course:
    pairs, ledger = _pairs(telemetry), telemetry.ledger
    seconds = sum(update.time_s - before.time_s for before, update in pairs)
    queues = [update.queue_depth for update in telemetry.updates if update.queue_depth is not None]
    credits = metric_values(telemetry.updates, "credit")
    return Course(
        num_updates=len(telemetry.updates),
        num_intervals=len(pairs),
        seconds=seconds,
        num_tokens=sum(sum(update.lag_histogram.values()) for _, update in pairs),
        waits=sum(update.wait_s or 0.0 for _, update in pairs) / seconds,
        paused=_paused(telemetry),
        lags=dict(lag_totals(telemetry.updates)),
        num_masked=sum(update.num_tokens_masked_lag for update in telemetry.updates),
        queue=fmean(queues) if queues else None,
        credit=fmean(credits) if credits else None,
        num_trained=ledger.num_groups_trained if ledger else 0,
        num_skipped=ledger.num_groups_skipped if ledger else 0,
        num_stale=ledger.num_groups_released_again.get("stale", 0) if ledger else 0,
        num_dead=ledger.num_groups_dead if ledger else 0,
    )


def _loads(telemetry: RunTelemetry) -> Iterator[tuple[WeightsLoaded, float]]:
    """Yields every load, and its seconds."""
    for events in telemetry.producers.values():
        for event in events:
            if isinstance(event, WeightsLoaded):
                yield event, (event.prefetch_s or 0.0) + (event.load_s or event.pause_s)


def _announce_s(telemetry: RunTelemetry) -> float:
    """Returns the median time from an update's line to the start of the loads of its policy."""
    made_s: dict[int, float] = {}
    for update in telemetry.updates:  # one without an optimizer step repeats the policy before
        made_s.setdefault(update.policy_version, update.time_s)
    found = [
        event.time_s - load_s - made_s[event.policy_version]
        for event, load_s in _loads(telemetry)
        if event.policy_version in made_s
    ]
    return max(0.0, median(found)) if found else 0.0


def _paused(telemetry: RunTelemetry) -> float:
    """Returns the share of their time that engines were paused for loads."""
    times = [[event.time_s for event in events] for events in telemetry.producers.values()]
    total_s = sum(max(found) - min(found) for found in times if found)
    return sum(event.pause_s for event, _ in _loads(telemetry)) / total_s if total_s else 0.0


def _buckets(telemetry: RunTelemetry) -> list[tuple[int, int, int]]:
    """Returns the number of rollouts in each length bucket, their tokens and its bound; stale and dead ones count."""
    found: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for update in telemetry.updates:
        for _, outcome, bucket, counts in Attrition(update.rollouts).counts():
            if outcome != "duplicate" and counts.num_tokens:
                found[bucket] += counts.num
                tokens[bucket] += counts.num_tokens
    return [(found[bucket], tokens[bucket], int(bucket) if bucket.isdigit() else _BEYOND) for bucket in found]


def _flat_logged(telemetry: RunTelemetry) -> float:
    updates = telemetry.updates
    skipped = sum(update.num_groups_skipped + update.metrics.get("fill_skipped_groups", 0) for update in updates)
    taken = skipped + sum(update.num_groups_trained for update in updates)
    return skipped / taken if taken else 0.0
