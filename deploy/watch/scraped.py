"""Builds the history of a run from scrapes of its metrics endpoints."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.deploy.launch.endpoints import MetricsEndpoint, Samples
from penstock.deploy.report.telemetry import PHASES, EvaluationPoint, Update
from penstock.schemas.metrics import LAG_LABELS, TRAINER_GAUGES, TRAINER_GAUGES_BY_LAG, lag_key, part_key
from penstock.schemas.metrics import TrainerMetric as M

_KEPT = 5000


class _Counters(NamedTuple):
    """A trainer's counters: batches, tokens, seconds by phase."""

    num_updates: int = 0
    num_trained: float = 0.0
    wait_s: float = 0.0
    step_s: float = 0.0
    publish_s: float = 0.0


class Scraped:
    """The updates, evaluations and pauses that scrapes show, for a run without a folder on this machine.

    Batches between two scrapes count as one: its means come from counters, its gauges from the last batch.
    """

    def __init__(self) -> None:
        self.updates: deque[Update] = deque(maxlen=_KEPT)
        self.evaluations: deque[EvaluationPoint] = deque(maxlen=_KEPT)
        self.pauses: dict[str, deque[tuple[float, float]]] = {}
        self._trainer: _Counters | None = None
        self._paused: dict[str, tuple[int, float]] = {}

    def add(self, endpoints: Sequence[MetricsEndpoint], now_s: float) -> None:
        for role, _, samples, _ in endpoints:
            if samples is not None and role == "trainer":
                self._add_trainer(samples, now_s)
            elif samples is not None:
                self._add_producer(role, samples, now_s)

    def _add_trainer(self, samples: Samples, now_s: float) -> None:
        now = _counters(samples)
        before = self._trainer or _Counters()
        self._trainer = now
        if now.num_updates < before.num_updates:  # another process, which counts from 0
            self.updates.clear()
            before = _Counters()
        if now.num_updates > before.num_updates:
            self.updates.append(_update(samples, before, now, now_s))
        reward = samples.get(M.EVALUATION_REWARD.name)
        parts = {part_key(name): v for name, v in samples.by_label(M.EVALUATION_REWARD_PART.name, "part").items()}
        newest = self.evaluations[-1] if self.evaluations else None
        if reward is not None and (newest is None or (newest.reward, newest.metrics) != (reward, parts)):
            point = EvaluationPoint(
                policy_version=0, update=now.num_updates, reward=reward, metrics=parts, num_prompts=0, time_s=now_s
            )
            self.evaluations.append(point)

    def _add_producer(self, producer: str, samples: Samples, now_s: float) -> None:
        num = round(samples.get("penstock_weight_pause_seconds_count") or 0)
        total_s = samples.get("penstock_weight_pause_seconds_sum") or 0.0
        before = self._paused.get(producer)
        self._paused[producer] = (num, total_s)
        pauses = self.pauses.setdefault(producer, deque(maxlen=_KEPT))
        if before is not None and num > before[0]:
            pauses.extend([(now_s, (total_s - before[1]) / (num - before[0]))] * (num - before[0]))


def _counters(samples: Samples) -> _Counters:
    seconds = (samples.get("penstock_step_seconds_sum", phase=phase) or 0.0 for phase in PHASES)
    return _Counters(
        round(samples.get("penstock_updates_total") or 0), samples.get("penstock_tokens_trained_total") or 0.0, *seconds
    )


def _update(samples: Samples, before: _Counters, now: _Counters, now_s: float) -> Update:
    count = now.num_updates - before.num_updates
    metrics = {key: samples.get(metric.name) for key, metric in TRAINER_GAUGES.items()}
    metrics |= {part_key(name): value for name, value in samples.by_label(M.REWARD_PART.name, "part").items()}
    for name, metric in TRAINER_GAUGES_BY_LAG.items():
        metrics |= {lag_key(name, label): samples.get(metric.name, lag=label) for label in LAG_LABELS}
    numbers = {key: value for key, value in metrics.items() if value is not None and math.isfinite(value)}
    queue_depth = numbers.pop("queue_depth", None)
    return Update(
        update=now.num_updates,
        policy_version=round(numbers.pop("policy_version", 0)),
        time_s=samples.get("penstock_last_update_timestamp_seconds") or now_s,
        lag_histogram={},
        num_tokens_trained=round((now.num_trained - before.num_trained) / count),
        num_tokens_masked_lag=0,
        num_groups_trained=0,
        num_groups_skipped=0,
        queue_depth=None if queue_depth is None else round(queue_depth),
        wait_s=(now.wait_s - before.wait_s) / count,
        step_s=(now.step_s - before.step_s) / count,
        publish_s=(now.publish_s - before.publish_s) / count,
        metrics=numbers,
    )
