"""Gathers a snapshot of a run from its folder, Redis and the metrics endpoints. It leaves out, and names, those that do
not answer."""

import contextlib
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis

from penstock.deploy.launch.endpoints import MetricsEndpoint, scrape, targets
from penstock.deploy.launch.producer_pool import read_heartbeats
from penstock.deploy.launch.progress import RunLines
from penstock.deploy.launch.redis_server import connect
from penstock.deploy.operate.producer_list import lag_by_commit, read_parity
from penstock.deploy.operate.run_access import own_url
from penstock.deploy.report.telemetry import EvaluationPoint, Update, current_line, place_evaluations, read_end
from penstock.deploy.watch.scraped import Scraped
from penstock.deploy.watch.snapshot import PAUSE_WINDOW_S, Pauses, ProducerSeen, RedisSeen, RunSnapshot
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Field, Keys
from penstock.schemas.process.redis_url import configured_url

_YOUNG_S = 5.0
"""The shortest time for a share of pauses: of a shorter one, the first pause would be everything."""


class Gatherer:
    """Takes snapshots of one run, from one thread.

    addresses: further metrics endpoints, `host:port`, that neither the run folder nor heartbeats name.
    """

    def __init__(self, name: str, folder: Path | None, config: RunConfig | None, addresses: Sequence[str] = ()) -> None:
        self._name = name
        self._folder = folder
        self._config = config
        self._addresses = addresses
        self._client: redis.Redis | None = None
        self._known: dict[str, None] = {}
        self._files = RunLines(folder) if folder is not None else None
        self._scraped = Scraped()
        self._announced_s: dict[int, float] = {}

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
        running = seen is not None and (seen.has_trainer or bool(seen.producers))
        until_s = now_s if running or not updates else updates[-1].time_s
        return RunSnapshot(
            name=self._name,
            config=self._config,
            redis=seen,
            without_redis=without_redis,
            trainer=trainer.samples if trainer is not None else None,
            without_trainer=trainer.problem if trainer is not None else "no endpoint of it is known",
            producers=tuple(self._known),
            starting=frozenset(filter(None, map(_starting, endpoints))),
            pauses={producer: self._pauses(producer, until_s) for producer in self._known},
            rebuilt=_rebuilt(endpoints),
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
            seen = read_redis(self._client, Keys(self._name), self._announced_s)
        except redis.RedisError as error:  # redis-py's messages hold host and port, never the password
            if self._client is not None:
                self._client.close()
                self._client = None  # a restarted server may have another address
            return None, str(error)
        self._known |= dict.fromkeys(seen.producers)
        return seen, ""

    def _look_at_endpoints(self, seen: RedisSeen | None) -> list[MetricsEndpoint]:
        """Scrapes the trainer, the producers and the caller's addresses."""
        by_role = targets(self._folder) if self._folder is not None else {}
        self._known |= dict.fromkeys(role for role in by_role if role != "trainer")
        if self._files is not None:
            self._known |= dict.fromkeys(self._files.pauses)
        for producer, (heartbeat, *_) in (seen.producers if seen is not None else {}).items():
            host = "127.0.0.1" if heartbeat.host == socket.gethostname() else heartbeat.host
            by_role.setdefault(producer, f"{host}:{heartbeat.metrics_port}")
        found = scrape([*by_role.items(), *(("", address) for address in self._addresses)])
        return [_with_role(each) for each in found]

    def _history(self) -> tuple[Sequence[Update], Sequence[EvaluationPoint]]:
        if self._files is not None and self._files.updates:
            updates = current_line(self._files.updates)
            return updates, place_evaluations(self._files.evaluations, updates)
        return list(self._scraped.updates), list(self._scraped.evaluations)

    def _is_over(self, seen: RedisSeen | None, updates: Sequence[Update]) -> bool:
        if seen is not None:
            return seen.finished
        return self._folder is not None and read_end(self._folder).is_over(updates)

    def _pauses(self, producer: str, until_s: float) -> Pauses:
        events = self._files.pauses.get(producer) if self._files is not None else None
        if events is None:
            events = self._scraped.pauses.get(producer, deque())
        seen = tuple(event for event in events if until_s - PAUSE_WINDOW_S <= event[0] <= until_s)
        # The window of a producer younger than it begins at the first pause.
        began_s = min(event[0] - event[1] for event in events) if events else 0.0
        return Pauses(seen, min(PAUSE_WINDOW_S, max(_YOUNG_S, until_s - began_s)))


def read_redis(client: redis.Redis, keys: Keys, announced_s: dict[int, float]) -> RedisSeen:
    """Reads a run's state from Redis and writes nothing. announced_s: the known times of policies; those of policies
    that producers hold are added. Raises redis.RedisError if Redis does not answer, or refuses."""
    pipeline: Any = client.pipeline(transaction=False)
    pipeline.hgetall(keys.commit)
    pipeline.xlen(keys.prompts)
    # Directly after XLEN: the server runs commands that arrive together without another client's in between.
    pipeline.xpending(keys.prompts, PRODUCERS_GROUP)
    pipeline.xlen(keys.rollouts)
    pipeline.exists(keys.lease)
    answers = pipeline.execute(raise_on_error=False)
    summary = answers.pop(2)
    for error in answers:
        if isinstance(error, redis.RedisError):
            raise error
    commit, num_prompts, num_entries, has_lease = answers
    newest = int(commit[Commit.VERSION]) if Commit.VERSION in commit else None
    heartbeats = read_heartbeats(client, keys)
    parity = read_parity(client, keys)
    _add_times(client, keys, {heartbeat.policy_version for heartbeat in heartbeats.values()}, announced_s)
    return RedisSeen(
        producers={
            producer: ProducerSeen(
                heartbeat,
                lag_by_commit(heartbeat.policy_version, newest, commit),
                announced_s.get(heartbeat.policy_version),
                parity.get(heartbeat.instance or heartbeat.producer_id),
            )
            for producer, heartbeat in heartbeats.items()
        },
        num_prompts=num_prompts,
        num_claimed=_num_claimed(summary),
        num_stream_entries=num_entries,
        finished=commit.get(Commit.FINISHED) == b"1",
        has_trainer=bool(has_lease),
    )


class _Announced(msgspec.Struct):
    """The field of a manifest that is shown."""

    created_s: float = 0.0


_announced = msgspec.json.Decoder(_Announced)


def _add_times(client: redis.Redis, keys: Keys, versions: Iterable[int], known: dict[int, float]) -> None:
    """Adds the times of `versions` that are in the manifests on the policy stream."""
    wanted = [version for version in versions if version >= 0 and version not in known]
    with client.pipeline(transaction=False) as pipeline:
        for version in wanted:
            pipeline.xrange(keys.policy, f"{version}-1", f"{version}-1")
        for version, entries in zip(wanted, pipeline.execute(), strict=True):
            with contextlib.suppress(msgspec.DecodeError):
                if entries and (created_s := _announced.decode(entries[0][1].get(Field.MANIFEST, b"")).created_s):
                    known[version] = created_s


def _num_claimed(summary: Any) -> int:
    if not isinstance(summary, redis.RedisError):
        return int(summary["pending"])
    if "NOGROUP" in str(summary):  # no producer has read yet
        return 0
    raise summary


def _with_role(endpoint: MetricsEndpoint) -> MetricsEndpoint:
    """Finds the role of a caller's address from the metrics that it serves."""
    samples = endpoint.samples
    if endpoint.role:
        return endpoint
    if samples is None or samples.get("penstock_updates_total") is not None:
        return endpoint._replace(role="trainer")
    return endpoint._replace(role=samples.label("penstock_tokens_generated_total", "producer") or "producer")


def _rebuilt(endpoints: Sequence[MetricsEndpoint]) -> dict[str, int]:
    """Counts the copies of the weights that were rebuilt, by reason."""
    found: Counter[str] = Counter()
    for endpoint in endpoints:
        if endpoint.samples is not None:
            counts = endpoint.samples.by_label("penstock_weight_copies_rebuilt_total", "reason")
            found.update({reason: round(count) for reason, count in counts.items() if 0 < count < math.inf})
    return dict(found)


def _starting(endpoint: MetricsEndpoint) -> str | None:
    """Returns the producer of an endpoint that has sampled nothing yet; None for any other endpoint."""
    sampled = endpoint.samples.get("penstock_tokens_generated_total") if endpoint.samples is not None else None
    return endpoint.role if sampled == 0 else None
