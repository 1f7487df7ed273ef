"""The metrics endpoints of a run's processes, scraped as Prometheus does, and the history that scrapes add up to."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

from penstock.deploy.report.telemetry import EvaluationPoint, Update
from penstock.schemas.metrics import LAG_LABELS, TRAINER_GAUGES, TRAINER_GAUGES_BY_LAG, lag_key, part_key
from penstock.schemas.metrics import TrainerMetric as M

_TIMEOUT_S = 2.0
_MAX_BYTES = 8_000_000
_AT_ONCE = 8
_KEPT = 5000
# Without the proxies of the environment: endpoints are on the run's own network.
_OPENER = build_opener(ProxyHandler({}))


class Samples:
    """One scrape: numbers by sample name and labels."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if `text` is no Prometheus text."""
        self._by_name: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._by_name.setdefault(sample.name, []).append((sample.labels, sample.value))
        except LookupError as error:  # the parser's, of some broken lines
            raise ValueError(f"no Prometheus text: {error}") from error

    def get(self, name: str, **labels: str) -> float | None:
        """The first sample of this name with these labels; None if there is none, or it is NaN."""
        for found, value in self._by_name.get(name, ()):
            if labels.items() <= found.items():
                return None if math.isnan(value) else value
        return None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The samples of this name by their `label`."""
        return {labels[label]: value for labels, value in self._by_name.get(name, ()) if label in labels}

    def label(self, name: str, label: str) -> str | None:
        """The value of `label` on the first sample of this name that has it."""
        return next((labels[label] for labels, _ in self._by_name.get(name, ()) if label in labels), None)


class MetricsEndpoint(NamedTuple):
    """The answer of one address. samples: None without one; `problem` then says why."""

    role: str
    address: str
    samples: Samples | None
    problem: str = ""


def targets(run_folder: Path) -> dict[str, str]:
    """`host:port` by role, from the run's `metrics/*.json`; unreadable files are passed over."""
    found: dict[str, str] = {}
    for file in sorted((run_folder / "metrics").glob("*.json")):
        try:
            found[file.stem] = str(json.loads(file.read_text())[0]["targets"][0])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return found


def scrape(addresses: Iterable[tuple[str, str]]) -> list[MetricsEndpoint]:
    """Scrapes each (role, address), `_AT_ONCE` at a time, with a timeout of `_TIMEOUT_S`."""
    wanted = list(addresses)
    if not wanted:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
        return list(pool.map(_look, wanted))


def _look(target: tuple[str, str]) -> MetricsEndpoint:
    role, address = target
    try:
        with _OPENER.open(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MAX_BYTES).decode()
            if answer.length:  # bytes announced and not sent
                raise ValueError(f"its answer lacks {answer.length:,} bytes")
            return MetricsEndpoint(role, address, Samples(text))
    except URLError as error:
        return MetricsEndpoint(role, address, None, str(error.reason))
    except (OSError, ValueError, HTTPException) as error:  # an invalid host name, a port of another protocol
        return MetricsEndpoint(role, address, None, str(error) or type(error).__name__)


class _Counters(NamedTuple):
    """A trainer's counters: batches, tokens, seconds by phase."""

    num_updates: int = 0
    num_trained: float = 0.0
    wait_s: float = 0.0
    step_s: float = 0.0
    publish_s: float = 0.0


class Scraped:
    """The updates, evaluations and pauses that scrapes show, for a run without a folder on this machine.

    Batches between two scrapes count as one: counters give its means, gauges are those of the last batch.
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
        parts = samples.by_label(M.EVALUATION_REWARD_PART.name, "part")
        newest = self.evaluations[-1] if self.evaluations else None
        if reward is not None and (newest is None or (newest.reward, newest.parts) != (reward, parts)):
            point = EvaluationPoint(
                policy_version=0, update=now.num_updates, reward=reward, parts=parts, num_prompts=0, time_s=now_s
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
    seconds = (samples.get("penstock_step_seconds_sum", phase=phase) or 0.0 for phase in ("wait", "step", "publish"))
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
