"""Puts together what the run folder, Redis and the metrics endpoints say. Whatever is away is left out, and named."""

import json
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from penstock.deploy.launch.progress import Tail
from penstock.deploy.launch.redis_server import connect
from penstock.deploy.operate.run_access import own_url
from penstock.deploy.report.telemetry import (
    EvaluationPoint,
    ProducerEvent,
    Update,
    WeightsLoaded,
    current_line,
    place_evaluations,
)
from penstock.deploy.watch.endpoints import MetricsEndpoint, scrape, targets
from penstock.deploy.watch.redis_view import look
from penstock.deploy.watch.scraped import Scraped
from penstock.deploy.watch.snapshot import PAUSE_WINDOW_S, Pauses, RedisSeen, RunSnapshot
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.process.redis_url import configured_url

_UPDATES_KEPT = 5000
_PAUSES_KEPT = 2000


class Gatherer:
    """Looks at one run again and again, from one thread.

    addresses: metrics endpoints, `host:port`, beside those that the run folder and the heartbeats name.
    """

    def __init__(self, name: str, folder: Path | None, config: RunConfig | None, addresses: Sequence[str] = ()) -> None:
        self._name = name
        self._folder = folder
        self._config = config
        self._addresses = addresses
        self._client: redis.Redis | None = None
        self._known: dict[str, None] = {}
        self._files = _Files(folder) if folder is not None else None
        self._scraped = Scraped()

    def gather(self) -> RunSnapshot:
        if self._files is not None:
            self._files.read()
        seen, without_redis = self._look_at_redis()
        endpoints = self._look_at_endpoints(seen)
        trainer = next((each for each in endpoints if each.role == "trainer"), None)
        now_s = time.time()
        self._scraped.add(endpoints, now_s)
        updates, evaluations = self._history()
        is_over = self._is_over(seen, updates)
        running = seen is not None and (seen.has_trainer or bool(seen.heartbeats))
        until_s = now_s if running or not updates else updates[-1].time_s
        return RunSnapshot(
            name=self._name,
            config=self._config,
            redis=seen,
            without_redis=without_redis,
            trainer=trainer.samples if trainer is not None else None,
            without_trainer=trainer.problem if trainer is not None else "no endpoint of it is known",
            producers=tuple(self._known),
            pauses={producer: self._pauses(producer, until_s) for producer in self._known},
            updates=tuple(updates),
            evaluations=tuple(evaluations),
            is_over=is_over,
            time_s=now_s,
        )

    def _look_at_redis(self) -> tuple[RedisSeen | None, str]:
        try:
            if self._client is None:
                url = configured_url(self._config) or (own_url(self._folder) if self._folder is not None else None)
                if url is None:
                    return None, "this run has no server yet"
                self._client = connect(url)
            seen = look(self._client, Keys(self._name))
        except redis.RedisError as error:  # redis-py's messages hold host and port, never the password
            if self._client is not None:
                self._client.close()
                self._client = None  # a server that comes back may be at another place
            return None, str(error)
        self._known |= dict.fromkeys(seen.heartbeats)
        return seen, ""

    def _look_at_endpoints(self, seen: RedisSeen | None) -> list[MetricsEndpoint]:
        """The trainer's, those of producers without a file here, and those named by the caller."""
        by_role = targets(self._folder) if self._folder is not None else {}
        self._known |= dict.fromkeys(role for role in by_role if role != "trainer")
        if self._files is not None:
            self._known |= dict.fromkeys(self._files.pauses)
        for producer, beat in (seen.heartbeats if seen is not None else {}).items():
            host = "127.0.0.1" if beat.host == socket.gethostname() else beat.host
            by_role.setdefault(producer, f"{host}:{beat.metrics_port}")
        with_file = self._files.pauses if self._files is not None else {}
        wanted = [(role, address) for role, address in by_role.items() if role not in with_file]
        found = scrape([*wanted, *(("", address) for address in self._addresses)])
        return [_with_role(each) for each in found]

    def _history(self) -> tuple[Sequence[Update], Sequence[EvaluationPoint]]:
        if self._files is not None and self._files.updates:
            updates = current_line(self._files.updates)
            return updates, place_evaluations(self._files.evaluations, updates)
        return list(self._scraped.updates), list(self._scraped.evaluations)

    def _is_over(self, seen: RedisSeen | None, updates: Sequence[Update]) -> bool:
        if seen is not None:
            return seen.finished
        books = _books(self._folder) if self._folder is not None else {}
        newest = updates[-1].update if updates else 0
        return books.get("finished") is True and newest <= books.get("num_updates", 0)

    def _pauses(self, producer: str, until_s: float) -> Pauses:
        events = self._files.pauses.get(producer) if self._files is not None else None
        if events is None:
            events = self._scraped.pauses.get(producer, deque())
        return Pauses(tuple(event for event in events if until_s - PAUSE_WINDOW_S <= event[0] <= until_s))


class _Files:
    """The lines that processes append to a run folder on this machine, or on a file system that it shares."""

    def __init__(self, folder: Path) -> None:
        self.updates: deque[Update] = deque(maxlen=_UPDATES_KEPT)
        self.evaluations: list[EvaluationPoint] = []
        self.pauses: dict[str, deque[tuple[float, float]]] = {}
        self._folder = folder
        self._update_lines = Tail(folder / "updates.jsonl", Update)
        self._evaluation_lines = Tail(folder / "evaluations.jsonl", EvaluationPoint)
        self._producer_lines: dict[str, Tail] = {}

    def read(self) -> None:
        self.updates.extend(self._update_lines.read())
        self.evaluations += self._evaluation_lines.read()
        for file in sorted((self._folder / "producers").glob("*.jsonl")):
            lines = self._producer_lines.setdefault(file.stem, Tail(file, ProducerEvent))
            pauses = self.pauses.setdefault(file.stem, deque(maxlen=_PAUSES_KEPT))
            pauses.extend((event.time_s, event.pause_s) for event in lines.read() if isinstance(event, WeightsLoaded))


def _with_role(endpoint: MetricsEndpoint) -> MetricsEndpoint:
    """An address that the caller has named says itself whose it is."""
    if endpoint.role or endpoint.samples is None:
        return endpoint._replace(role=endpoint.role or "trainer")
    if endpoint.samples.get("penstock_updates_total") is not None:
        return endpoint._replace(role="trainer")
    return endpoint._replace(role=endpoint.samples.label("penstock_tokens_generated_total", "producer") or "producer")


def _books(folder: Path) -> dict[str, Any]:
    try:
        books = json.loads((folder / "trainer.json").read_text())
    except (OSError, ValueError):
        return {}
    return books if isinstance(books, dict) else {}
