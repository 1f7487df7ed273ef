"""`penstock producers`: the producers of a run, their policies, and claims whose producer is gone."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import redis

from penstock.consumers.stream.scripts import announced_of, forks_of
from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.operate.audit import pending
from penstock.deploy.operate.run_access import OpenRun, open_run
from penstock.schemas.heartbeat import HEARTBEAT_TTL_S, Heartbeat, decode_heartbeat
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.policy import FutureVersionError, UnknownVersionError, lag
from penstock.schemas.producer_parity import ProducerParity, decode_parity


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """A producer with a heartbeat. lag: optimizer steps behind the newest policy; None if it is not known."""

    producer_id: str
    policy_version: int
    lag: int | None
    num_in_flight: int
    oldest_in_flight_s: float | None
    num_claims: int
    """Its claims in Redis, evaluations included."""
    tokens_per_s: float
    num_tokens_generated: int
    num_groups_appended: int
    num_weight_loads_failed: int
    last_seen_s: float
    """Seconds since its last heartbeat, by Redis' clock."""
    host: str
    pid: int
    metrics_port: int
    engine: str
    endpoint: str
    """URL at which it serves agents; empty without an endpoint."""
    last_error: str
    mismatch: float | None = None
    """|engine - trainer| of its rows at lag 0, by the trainer, in nats; None before the first."""
    quarantine: str = ""
    """Why the trainer trains on none of its groups; empty if it does."""


class Orphaned(msgspec.Struct, frozen=True, kw_only=True):
    """Claims of an id without a heartbeat: its producer is gone, or cannot reach Redis."""

    consumer: str
    num_prompts: int
    num_evaluations: int
    shortest_idle_s: float
    longest_idle_s: float


class Producers(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    newest_version: int | None
    """The policy announced last; None before the first."""
    finished: bool
    alive: tuple[Alive, ...]
    orphaned: tuple[Orphaned, ...]
    unreadable: tuple[str, ...]
    """Ids whose heartbeat is of another release."""


def list_producers(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> Producers:
    """Lists the producers of a run with their policies and rates, and claims whose producer is gone."""
    with open_run(run, runs) as opened:
        return producers_of(opened)


def producers_of(run: OpenRun) -> Producers:
    """Lists a run's producers. Reads claims before heartbeats: a producer sends a heartbeat before it claims, so no
    claim of a live producer looks orphaned. Raises ServerError if the run's Redis cannot be reached."""
    client, keys = run.redis, run.keys
    claims = {stream: pending(client, stream) for stream in (keys.prompts, keys.evaluations)}
    heartbeats = _heartbeats(client, keys)
    commit: Any = client.hgetall(keys.commit)
    parity = read_parity(client, keys)
    newest = int(commit[Commit.VERSION]) if Commit.VERSION in commit else None
    num_claims = Counter(_shown(row["consumer"]) for rows in claims.values() for row in rows)
    return Producers(
        run=run.name,
        newest_version=newest,
        finished=commit.get(Commit.FINISHED) == b"1",
        alive=tuple(
            _alive(heartbeat, age_s, num_claims[producer_id], newest, commit, parity)
            for producer_id, (heartbeat, age_s) in sorted(heartbeats.items(), key=lambda item: (len(item[0]), item[0]))
            if heartbeat is not None
        ),
        orphaned=tuple(
            _orphaned(consumer, claims[keys.prompts], claims[keys.evaluations])
            for consumer in sorted(num_claims)
            if consumer not in heartbeats
        ),
        unreadable=tuple(
            sorted(producer_id for producer_id, (heartbeat, _) in heartbeats.items() if heartbeat is None)
        ),
    )


def _heartbeats(client: redis.Redis, keys: Keys) -> dict[str, tuple[Heartbeat | None, float]]:
    """Returns, by producer id, its heartbeat (None if it cannot be decoded) and the seconds since it was sent."""
    found = {}
    prefix = keys.producer("").encode()
    for name in set(client.scan_iter(keys.producer_pattern, count=1000)):
        pipeline = client.pipeline(transaction=True)
        pipeline.get(name)
        pipeline.pttl(name)
        value, left_ms = pipeline.execute()
        if value is None:
            continue  # it expired in between
        try:
            heartbeat = decode_heartbeat(value)
        except msgspec.DecodeError:
            heartbeat = None
        found[_shown(name.removeprefix(prefix))] = (heartbeat, max(0.0, HEARTBEAT_TTL_S - left_ms / 1000))
    return found


def read_parity(client: redis.Redis, keys: Keys) -> dict[str, ProducerParity]:
    """Returns the trainer's measurements of the producers' rows, by instance."""
    found: dict[str, ProducerParity] = {}
    fields: Any = client.hgetall(keys.parity)
    for instance, value in fields.items():
        with contextlib.suppress(msgspec.DecodeError):
            found[_shown(instance)] = decode_parity(value)
    return found


def _alive(
    heartbeat: Heartbeat,
    age_s: float,
    num_claims: int,
    newest: int | None,
    commit: dict[bytes, bytes],
    parity: Mapping[str, ProducerParity],
) -> Alive:
    found = parity.get(heartbeat.instance or heartbeat.producer_id)
    # Up to the heartbeat by the producer's clock, after it by Redis': no two clocks are compared.
    ages = [heartbeat.sent_s - claim.claimed_s + age_s for claim in heartbeat.in_flight]
    return Alive(
        producer_id=heartbeat.producer_id,
        policy_version=heartbeat.policy_version,
        lag=lag_by_commit(heartbeat.policy_version, newest, commit),
        num_in_flight=len(heartbeat.in_flight),
        oldest_in_flight_s=max(ages, default=None),
        num_claims=num_claims,
        tokens_per_s=heartbeat.tokens_per_s,
        num_tokens_generated=heartbeat.num_tokens_generated,
        num_groups_appended=heartbeat.num_groups_appended,
        num_weight_loads_failed=heartbeat.num_weight_loads_failed,
        last_seen_s=age_s,
        host=heartbeat.host,
        pid=heartbeat.pid,
        metrics_port=heartbeat.metrics_port,
        engine=f"{heartbeat.fingerprint.engine} {heartbeat.fingerprint.version}",
        endpoint=heartbeat.endpoint,
        last_error=heartbeat.last_error,
        mismatch=None if found is None else found.gap,
        quarantine=found.reason if found is not None and found.quarantined_s else "",
    )


def lag_by_commit(version: int, newest: int | None, commit: dict[bytes, bytes]) -> int | None:
    """Returns a policy's lag behind the newest, by the commit hash; None if it is not known."""
    if newest is None:
        return None
    try:
        return lag(version, newest, forks_of(commit), announced_of(commit))
    except (UnknownVersionError, FutureVersionError):
        return None


def _orphaned(consumer: str, prompts: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> Orphaned:
    held = [[row for row in rows if _shown(row["consumer"]) == consumer] for rows in (prompts, evaluations)]
    idle_s = [row["time_since_delivered"] / 1000 for rows in held for row in rows]
    return Orphaned(
        consumer=consumer,
        num_prompts=len(held[0]),
        num_evaluations=len(held[1]),
        shortest_idle_s=min(idle_s),
        longest_idle_s=max(idle_s),
    )


def _shown(name: bytes) -> str:
    """Returns a producer's id as text: a broken or hostile producer may send any bytes."""
    return name.decode(errors="backslashreplace")
