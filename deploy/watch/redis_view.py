"""What Redis knows of a run, in a few short commands."""

from typing import Any

import msgspec
import redis
from penstock.deploy.operate.producer_list import steps_behind
from penstock.deploy.watch.snapshot import RedisSeen
from penstock.schemas.heartbeat import Heartbeat, decode_heartbeat
from penstock.schemas.keys import PRODUCERS_GROUP, Commit, Keys


def look(client: redis.Redis, keys: Keys) -> RedisSeen:
    """Reads only. Raises redis.RedisError where the server does not answer, or refuses."""
    pipeline: Any = client.pipeline(transaction=False)
    pipeline.hgetall(keys.commit)
    pipeline.xlen(keys.prompts)
    # Right behind it: the server answers what arrives together without another client's command in between.
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
    beats = _heartbeats(client, keys)
    return RedisSeen(
        heartbeats=beats,
        num_prompts=num_prompts,
        num_claimed=_num_claimed(summary),
        num_stream_entries=num_entries,
        newest_version=newest,
        lags={producer: steps_behind(beat.policy_version, newest, commit) for producer, beat in beats.items()},
        finished=commit.get(Commit.FINISHED) == b"1",
        has_trainer=bool(has_lease),
    )


def _num_claimed(summary: Any) -> int:
    if not isinstance(summary, redis.RedisError):
        return int(summary["pending"])
    if "NOGROUP" in str(summary):  # no producer has asked yet
        return 0
    raise summary


def _heartbeats(client: redis.Redis, keys: Keys) -> dict[str, Heartbeat]:
    """Those of another release are left out: `penstock producers` names them."""
    names = list(client.scan_iter(keys.producer_pattern, count=1000))
    values: list[Any] = client.mget(names) if names else []
    found = {}
    for value in values:
        try:
            beat = decode_heartbeat(value) if value is not None else None
        except msgspec.DecodeError:
            continue
        if beat is not None:
            found[beat.producer_id] = beat
    return found
