"""Shared by the rows of the stream section: settings, a server of their own, load processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import redis

from bench.section import Bench, redis_server
from bench.stream.ends import plain_client
from bench.stream.load import LoadProcess

MAXMEMORY_MB = 2048
MEGABYTE = 1_000_000


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and repetitions. The defaults take about four minutes on two quiet cores, ten more for `reliability`."""

    rounds: int = 11
    """Rounds of every row but `memory` (one) and `reliability`."""
    payload_mb: float = 40.0
    """Payload that one measurement of a rate moves."""
    peer_groups: int = 300
    """Groups that one measurement against the peer moves."""
    reliability_rounds: int = 3
    reliability_updates: int = 105
    """Updates of one run. Rates leave out the first few, so that a hundred remain: one checkpoint of the demo's."""
    reliability_limit_s: float = 300.0


QUICK_STREAM = StreamSettings(
    rounds=2,
    payload_mb=3.0,
    peer_groups=24,
    reliability_rounds=1,
    reliability_updates=12,
    reliability_limit_s=15.0,
)
"""Shows that everything runs. Its figures mean nothing."""


class BenchServer(NamedTuple):
    url: str
    client: "redis.Redis"


@contextmanager
def bench_server(bench: Bench, row: str) -> Iterator[BenchServer]:
    """Starts a server as a run does: UNIX socket, append-only file with fsync every second. The file is rewritten
    between measurements only."""
    with (
        redis_server(bench.folder / row, maxmemory_mb=MAXMEMORY_MB) as server,
        plain_client(server.url) as client,
    ):
        client.config_set("auto-aof-rewrite-percentage", 0)
        yield BenchServer(server.url, client)


@contextmanager
def load_processes(bench: Bench, server: BenchServer, *names: str) -> Iterator[list[LoadProcess]]:
    """Starts load processes at that server; they end with the block."""
    started: list[LoadProcess] = []
    try:
        for name in names:
            started.append(LoadProcess(name, server.url, bench.folder))
        yield started
    finally:
        for process in started:
            process.end()


def groups_for(bench: Bench, payload_bytes: int) -> int:
    """Returns the number of groups of `payload_bytes` in one measurement."""
    return max(16, int(bench.settings.payload_mb * MEGABYTE / payload_bytes))


def empty(client: "redis.Redis") -> None:
    """Removes all keys and their log, so that every measurement finds the same server."""
    client.flushall()
    client.bgrewriteaof()
    while True:
        info: Any = client.info("persistence")
        if not info["aof_rewrite_in_progress"] and not info["aof_rewrite_scheduled"]:
            return
        time.sleep(0.01)
