"""Gathers a snapshot of a run from its folder and its Redis. It leaves out, and names, what does not answer."""

import time
from pathlib import Path
from typing import Any

import redis

from penstock.deploy.launch.producer_pool import read_heartbeats
from penstock.deploy.launch.progress import RunLines
from penstock.deploy.launch.redis_server import connect
from penstock.deploy.operate.producer_list import lag_by_commit
from penstock.deploy.operate.run_access import own_url
from penstock.deploy.report.lines import read_end
from penstock.deploy.report.telemetry import current_line, place_evaluations, steady_times
from penstock.deploy.watch.snapshot import PAUSE_WINDOW_S, Pauses, ProducerSeen, RedisSeen, RunSnapshot
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Keys
from penstock.schemas.process.redis_url import configured_url

_YOUNG_S = 5.0
"""The shortest time for a share of pauses: of a shorter one, the first pause would be everything."""


class Gatherer:
    """Takes snapshots of one run, from one thread."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self._folder = folder
        self._config = config
        self._client: redis.Redis | None = None
        self._lines = RunLines(folder)

    def gather(self) -> RunSnapshot:
        lines = self._lines
        lines.read()
        in_redis, without_redis = self._look_at_redis()
        now_s = time.time()
        updates = steady_times(current_line(lines.updates))
        is_running = in_redis is not None and (in_redis.has_trainer or bool(in_redis.producers))
        until_s = now_s if is_running or not updates else updates[-1].time_s
        return RunSnapshot(
            config=self._config,
            redis=in_redis,
            without_redis=without_redis,
            pauses={producer: self._pauses(producer, until_s) for producer in lines.pauses},
            updates=tuple(updates),
            evaluations=tuple(place_evaluations(lines.evaluations, updates)),
            is_over=read_end(self._folder).is_over(updates) if in_redis is None else in_redis.finished,
            time_s=now_s,
        )

    def _look_at_redis(self) -> tuple[RedisSeen | None, str]:
        try:
            if self._client is None:
                url = configured_url(self._config) or own_url(self._folder)
                if url is None:
                    return None, "this run has no server yet"
                self._client = connect(url)
            return read_redis(self._client, Keys(self._config.name)), ""
        except redis.RedisError as error:  # redis-py's messages hold host and port, never the password
            if self._client is not None:
                self._client.close()
                self._client = None  # a restarted server may have another address
            return None, str(error)

    def _pauses(self, producer: str, until_s: float) -> Pauses:
        events = self._lines.pauses[producer]
        recent = tuple(event for event in events if until_s - PAUSE_WINDOW_S <= event[0] <= until_s)
        # The window of a producer younger than it begins at the first pause.
        began_s = min(event[0] - event[1] for event in events) if events else 0.0
        return Pauses(recent, min(PAUSE_WINDOW_S, max(_YOUNG_S, until_s - began_s)))


def read_redis(client: redis.Redis, keys: Keys) -> RedisSeen:
    """Reads a run's state from Redis and writes nothing. Raises redis.RedisError if Redis does not answer, or
    refuses."""
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
    return RedisSeen(
        producers={
            producer: ProducerSeen(heartbeat, lag_by_commit(heartbeat.policy_version, newest, commit))
            for producer, heartbeat in read_heartbeats(client, keys).items()
        },
        num_prompts=num_prompts,
        num_claimed=_num_claimed(summary),
        num_stream_entries=num_entries,
        finished=commit.get(Commit.FINISHED) == b"1",
        has_trainer=bool(has_lease),
    )


def _num_claimed(summary: Any) -> int:
    if not isinstance(summary, redis.RedisError):
        return int(summary["pending"])
    if "NOGROUP" in str(summary):  # no producer has read yet
        return 0
    raise summary
