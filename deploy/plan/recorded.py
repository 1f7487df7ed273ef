"""The pace and the course of a run that has been, from its record of rollouts and its telemetry."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from penstock.deploy.plan.producer import EngineSpeed
from penstock.deploy.plan.simulation import Course, RunPace
from penstock.deploy.report.telemetry import Rate, RunTelemetry, Update, WeightsLoaded, read_telemetry
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.policy import split_version
from penstock.schemas.record import RecordReadError
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import RecordError, Timings

FEWEST_UPDATES = 3


class _Sampled(NamedTuple):
    """One recorded group. lengths: of its siblings."""

    producer_id: str
    timings: Timings
    lengths: tuple[int, ...]
    is_flat: bool

    @property
    def seconds(self) -> float:
        """From its claim to its last token."""
        return max(1e-6, self.timings.generated_s - self.timings.claimed_s)


class PacedRun(NamedTuple):
    """groups: the lengths of siblings, by group."""

    config: RunConfig
    num_producers: int
    pace: RunPace
    groups: tuple[tuple[int, ...], ...]
    course: Course


def read_run(folder: Path) -> PacedRun:
    """What the folder of a run says of its pace and its course.

    Raises:
        ConfigError: no run file or record that can be read, or too few updates.
        TelemetryError: a malformed line.
    """
    telemetry = read_telemetry(folder)
    try:
        sampled = list(_sampled(Record(folder)))
    except (RecordReadError, RecordError) as error:
        raise ConfigError(str(error)) from None
    config, update_s = telemetry.config, _update_s(telemetry)
    if config is None or not sampled or len(telemetry.updates) < FEWEST_UPDATES or not any(update_s):
        raise ConfigError(
            f"{folder}: a run file: {'no' if config is None else 'yes'}, {len(telemetry.updates)} updates, "
            f"{len(sampled)} recorded groups: expected a run file, {FEWEST_UPDATES} updates or more, and their groups"
        )
    loads, (start_s, speed) = list(_loads(telemetry)), _speed(sampled, telemetry)
    pace = RunPace(
        start_s=start_s,
        speed=speed,
        trainer_tokens_per_s=1 / fmean(update_s),
        update_factors=tuple(seconds / fmean(update_s) for seconds in update_s),
        announce_s=_announce_s(telemetry),
        load_s=median(load_s for _, load_s in loads) if loads else 0.0,
        pause_s=fmean(event.pause_s for event, _ in loads) if loads else 0.0,
        reward_s=tuple(max(0.0, group.timings.appended_s - group.timings.generated_s) for group in sampled),
        flat=fmean(group.is_flat for group in sampled),
    )
    num_producers = len({group.producer_id for group in sampled})
    return PacedRun(config, num_producers, pace, tuple(group.lengths for group in sampled), _course(telemetry))


def _sampled(record: Record) -> Iterator[_Sampled]:
    """The groups that were sampled whole; RecordReadError as `Record.batch` has it."""
    for batch in record.batches:
        head, groups = record.batch(batch)
        for entry, recorded in zip(head.groups, groups, strict=True):
            if entry.outcome in ("trained", "skipped"):
                group = recorded.decode()
                lengths = tuple(max(1, rollout.num_sampled_tokens) for rollout in group.rollouts)
                yield _Sampled(group.producer_id, group.timings, lengths, not any(entry.advantages))


def _speed(sampled: Sequence[_Sampled], telemetry: RunTelemetry) -> tuple[float, EngineSpeed]:
    """The seconds before a group's first step, and those of a step, by the sequences in flight: least squares, with no
    part below 0, over the seconds of groups.

    A sibling is taken to have ended when its share of the longest one's tokens was sampled. Evaluations and stale
    groups are not in the record: as many sequences more are taken to have been in flight as tokens more were sampled
    than it has. Time in which the engine was paused does not count.
    """
    recorded = sum(sum(group.lengths) for group in sampled)
    unseen, paused = max(1.0, _num_sampled(telemetry) / recorded), _paused(telemetry)
    by_producer: dict[str, list[_Sampled]] = {}
    for group in sampled:
        by_producer.setdefault(group.producer_id, []).append(group)
    rows: list[tuple[float, float, float]] = []
    seconds: list[float] = []
    for groups in by_producer.values():
        starts = np.array([group.timings.claimed_s for group in groups for _ in group.lengths])
        shares = np.array([length / max(group.lengths) for group in groups for length in group.lengths])
        ends = starts + shares * np.array([group.seconds for group in groups for _ in group.lengths])
        times = np.sort(np.concatenate([starts, ends]))
        running = np.searchsorted(np.sort(starts), times, "right") - np.searchsorted(np.sort(ends), times, "right")
        area = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
        for group in groups:
            first, last = np.interp([group.timings.claimed_s, group.timings.generated_s], times, area)
            rows.append((1.0, max(group.lengths), max(group.lengths) * unseen * (last - first) / group.seconds))
            seconds.append(group.seconds * (1 - paused))
    start_s, base_s, sequence_s = _least_squares(np.array(rows), np.array(seconds))
    return start_s, EngineSpeed(base_s, sequence_s)


def _least_squares(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """The factors of the columns, none below 0; the last two are not both 0."""
    best, least = [0.0] * rows.shape[1], np.inf
    for columns in ((0, 1, 2), (1, 2), (0, 1), (0, 2), (1,), (2,)):
        found = np.linalg.lstsq(rows[:, columns], values, rcond=None)[0]
        error = float(((rows[:, columns] @ found - values) ** 2).sum())
        if found.min() >= 0 and found[-1] > 0 and error < least * (1 - 1e-9):
            best, least = [0.0] * rows.shape[1], error
            for column, factor in zip(columns, found.tolist(), strict=True):
                best[column] = factor
    return best


def _update_s(telemetry: RunTelemetry) -> list[float]:
    """The seconds of a sampled token of each update but the first of each trainer, waits for groups left out."""
    return [
        max(0.0, update.time_s - before.time_s - (update.wait_s or 0.0)) / sum(update.lag_histogram.values())
        for before, update in _pairs(telemetry)
        if update.lag_histogram
    ]


def _pairs(telemetry: RunTelemetry) -> list[tuple[Update, Update]]:
    """Neighbouring updates of one trainer."""
    return [
        (before, update)
        for before, update in pairwise(telemetry.updates)
        if split_version(before.policy_version)[0] == split_version(update.policy_version)[0]
    ]


def _course(telemetry: RunTelemetry) -> Course:
    pairs, ledger = _pairs(telemetry), telemetry.ledger
    lags: Counter[int] = Counter()
    for update in telemetry.updates:
        lags.update(update.lag_histogram)
    seconds = sum(update.time_s - before.time_s for before, update in pairs)
    queues = [update.queue_depth for update in telemetry.updates if update.queue_depth is not None]
    credits = [update.metrics["credit"] for update in telemetry.updates if "credit" in update.metrics]
    return Course(
        num_updates=len(telemetry.updates),
        seconds=seconds,
        num_tokens=sum(sum(update.lag_histogram.values()) for _, update in pairs),
        waits=sum(update.wait_s or 0.0 for _, update in pairs) / seconds,
        paused=_paused(telemetry),
        lags=dict(lags),
        num_masked=sum(update.num_tokens_masked_lag for update in telemetry.updates),
        queue=fmean(queues) if queues else None,
        credit=fmean(credits) if credits else None,
        num_trained=ledger.num_groups_trained if ledger else 0,
        num_skipped=ledger.num_groups_skipped if ledger else 0,
        num_stale=ledger.num_groups_released_again.get("stale", 0) if ledger else 0,
        num_dead=ledger.num_groups_dead if ledger else 0,
    )


def _loads(telemetry: RunTelemetry) -> Iterator[tuple[WeightsLoaded, float]]:
    """Every load, and its seconds."""
    for events in telemetry.producers.values():
        for event in events:
            if isinstance(event, WeightsLoaded):
                yield event, (event.prefetch_s or 0.0) + (event.load_s or event.pause_s)


def _announce_s(telemetry: RunTelemetry) -> float:
    """From the line of an update to the start of the loads of its policy: the median."""
    made_s = {update.policy_version: update.time_s for update in telemetry.updates}
    found = [
        event.time_s - load_s - made_s[event.policy_version]
        for event, load_s in _loads(telemetry)
        if event.policy_version in made_s
    ]
    return max(0.0, median(found)) if found else 0.0


def _num_sampled(telemetry: RunTelemetry) -> int:
    """Tokens that producers have sampled, whatever became of them."""
    counts = [
        [event.num_tokens for event in events if isinstance(event, Rate)] for events in telemetry.producers.values()
    ]  # a producer that is started again counts from 0
    return sum(max(0, after - before) for found in counts for before, after in pairwise([0, *found]))


def _paused(telemetry: RunTelemetry) -> float:
    """The share of their time that engines were paused for loads."""
    times = [[event.time_s for event in events if event.time_s] for events in telemetry.producers.values()]
    total_s = sum(max(found) - min(found) for found in times if found)
    return sum(event.pause_s for event, _ in _loads(telemetry)) / total_s if total_s else 0.0
