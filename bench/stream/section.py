"""The stream section: records on the wire, and the rates at which groups get onto the stream and off it."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import redis

from bench.result import BenchError, Figure, compare_rounds, in_turns
from bench.section import Bench, BenchSection, redis_server
from bench.stream.ends import (
    ENTRIES_PER_ROUND_TRIP,
    TrainerEnd,
    append_groups,
    fill,
    group_of,
    plain_client,
    read_bare,
    release_prompts,
)
from bench.stream.records import record_figures
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import encode_group

KEYS = Keys("bench")
MAXMEMORY_MB = 2048
KILOBYTES = (16, 64, 256)
"""Sizes of an entry."""


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about two minutes on two quiet cores.

    payload_mb: moved by one measurement of a rate.
    """

    rounds: int = 11
    payload_mb: float = 40.0


@contextmanager
def bench_server(bench: Bench, row: str) -> Iterator[tuple[str, "redis.Redis"]]:
    """Starts a server as a run does: UNIX socket, append-only file with fsync every second. The file is rewritten
    between measurements only. Yields its URL and a client."""
    with redis_server(bench.folder / row, maxmemory_mb=MAXMEMORY_MB) as server, plain_client(server.url) as client:
        client.config_set("auto-aof-rewrite-percentage", 0)
        yield server.url, client


def empty(client: "redis.Redis") -> None:
    """Removes all keys and their log, so that every measurement finds the same server."""
    client.flushall()
    client.bgrewriteaof()
    while True:
        info: Any = client.info("persistence")
        if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
            return
        time.sleep(0.01)


def expect(found: object, expected: object, what: str) -> None:
    """Raises BenchError if a measurement moved something else than it should have."""
    if found != expected:
        raise BenchError(f"{found} {what}, expected {expected}")


def rate_figures(bench: Bench) -> Iterator[Figure]:
    """Compares the producer's writer and the trainer's reader with a bare client that appends and reads the same
    groups."""
    with bench_server(bench, "rates") as (url, client):
        for kilobytes in KILOBYTES:
            yield from _rate_figures(bench, url, client, kilobytes)


def _rate_figures(bench: Bench, url: str, client: "redis.Redis", kilobytes: int) -> Iterator[Figure]:
    group = group_of(kilobytes * 1024)
    payload_bytes = len(encode_group(group))
    num_groups = max(16, int(bench.settings.payload_mb * 1e6 / payload_bytes))

    def append_bare() -> float:
        began = time.monotonic()
        fill(client, KEYS, group, num_groups)
        return done(began)

    def append() -> float:
        release_prompts(client, KEYS, num_groups)
        began, ended = asyncio.run(append_groups(url, KEYS, group, num_groups))
        expect((client.xlen(KEYS.rollouts), client.xlen(KEYS.prompts)), (num_groups, 0), "entries")
        empty(client)
        return num_groups / (ended - began)

    def read_undecoded() -> float:
        fill(client, KEYS, group, num_groups)
        began = time.monotonic()
        expect(read_bare(client, KEYS), num_groups, "entries read")
        return done(began)

    def read() -> float:
        fill(client, KEYS, group, num_groups)
        end = TrainerEnd(url, KEYS, num_groups)
        began = time.monotonic()
        while end.num_read < num_groups:
            end.read()
        expect(end.acknowledge(), num_groups, "entries trimmed")
        end.close()
        return done(began)

    def done(began: float) -> float:
        took_s = time.monotonic() - began
        empty(client)
        return num_groups / took_s

    measures = {"append bare": append_bare, "append": append, "read bare": read_undecoded, "read": read}
    found = in_turns(bench.settings.rounds, measures)
    rows = {
        "append": (
            "appended by the writer",
            f"redis-py: encoded, {ENTRIES_PER_ROUND_TRIP} XADD a round trip",
            "groups that wait, encoded; each in a MULTI with its prompt's XACK and XDEL, several in one",
        ),
        "read": (
            "read, decoded, checked, settled and committed",
            f"redis-py: XREAD of {ENTRIES_PER_ROUND_TRIP} at a time, undecoded, then XTRIM",
            "as a trainer that trains at once would",
        ),
    }
    for name, (words, reference_is, what) in rows.items():
        yield compare_rounds(
            f"groups {words}, {kilobytes} kB",
            found[name],
            found[f"{name} bare"],
            reference_is=reference_is,
            details={"payload_bytes": payload_bytes, "num_groups": num_groups, "what": what},
        )


STREAM = BenchSection(
    "stream",
    {"records": lambda bench: record_figures(), "rates": rate_figures},
    StreamSettings(),
    quick=StreamSettings(rounds=2, payload_mb=3.0),
)
