"""The stream section: rates at which groups get onto the stream and off it, against the server and the network."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis

from bench.result import BenchError, Figure, Goal, compare_rounds, in_turns
from bench.section import Bench, BenchSection, found_apart, redis_server, start_apart, wait_for
from bench.stream.ends import (
    ENTRIES_PER_ROUND_TRIP,
    Span,
    TrainerEnd,
    append_groups,
    fill,
    group_of,
    plain_client,
    release_prompts,
)
from bench.stream.load import GO, READY, Append
from bench.stream.records import record_figures
from bench.stream.references import MEGABYTE, RECEIVE_BYTES, loopback_mb_per_s, open_tcp_port
from penstock.producers.stream.in_flight import SHARE
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import encode_group

KEYS = Keys("bench")
MAXMEMORY_MB = 2048
GROUPS_IN_FLIGHT = 32
"""A producer's, as in the demo."""
KILOBYTES = 1024
APPEND_KILOBYTES = (16, 64)
READ_KILOBYTES = (16, 64, 256)
READ_GOAL = 0.5
NUM_PRODUCERS = 64
BURST = GROUPS_IN_FLIGHT // SHARE
"""Groups that finish together in one producer: the number that it claims at once."""
NUM_LOAD_PROCESSES = 2
PRODUCERS_GOAL = 0.9


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


def groups_for(bench: Bench, payload_bytes: int) -> int:
    """Returns the number of groups of `payload_bytes` in one measurement."""
    return max(16, int(bench.settings.payload_mb * MEGABYTE / payload_bytes))


def expect(found: object, expected: object, what: str) -> None:
    """Raises BenchError if a measurement moved something else than it should have."""
    if found != expected:
        raise BenchError(f"{found} {what}, expected {expected}")


def append_figures(bench: Bench) -> list[Figure]:
    """Compares XADD by the producer's writer with a bare client that appends the same groups, both on the UNIX
    socket."""
    with bench_server(bench, "xadd") as (url, client):
        return [_append_figure(bench, url, client, kilobytes) for kilobytes in APPEND_KILOBYTES]


def _append_figure(bench: Bench, url: str, client: "redis.Redis", kilobytes: int) -> Figure:
    group = group_of(kilobytes * KILOBYTES)
    num_groups = groups_for(bench, len(encode_group(group)))

    def bare() -> float:
        began = time.monotonic()
        fill(client, KEYS, group, num_groups)
        took_s = time.monotonic() - began
        empty(client)
        return num_groups / took_s

    def writer() -> float:
        release_prompts(client, KEYS, num_groups)
        began, ended = asyncio.run(append_groups(url, KEYS, group, num_groups))
        expect((client.xlen(KEYS.rollouts), client.xlen(KEYS.prompts)), (num_groups, 0), "entries")
        empty(client)
        return num_groups / (ended - began)

    found = in_turns(bench.settings.rounds, {"bare": bare, "writer": writer})
    return compare_rounds(
        f"XADD by the writer, {kilobytes} kB",
        found["writer"],
        found["bare"],
        reference_is=f"redis-py: encoded, {ENTRIES_PER_ROUND_TRIP} XADD a round trip",
        details={
            "num_groups": num_groups,
            "what": "groups that wait, encoded; each in a MULTI with its prompt's XACK and XDEL, several in one",
        },
    )


def read_figures(bench: Bench) -> list[Figure]:
    """Compares the trainer's reader and its commit with a plain TCP connection, both over loopback."""
    figures = []
    with bench_server(bench, "read") as (url, client):
        tcp_url = f"redis://:{urlsplit(url).password}@127.0.0.1:{open_tcp_port(client)}"
        for kilobytes in READ_KILOBYTES:
            figures += _read_figures(bench, client, tcp_url, kilobytes)
    return figures


def _read_figures(bench: Bench, client: "redis.Redis", url: str, kilobytes: int) -> list[Figure]:
    group = group_of(kilobytes * KILOBYTES)
    payload_bytes = len(encode_group(group))
    num_groups = groups_for(bench, payload_bytes)

    def reader(decodes: bool) -> float:
        total = fill(client, KEYS, group, num_groups)
        end = TrainerEnd(url, KEYS, num_groups, decodes=decodes)
        began = time.monotonic()
        while end.num_read < num_groups:
            end.read(block=False)
        trimmed = end.acknowledge()
        took_s = time.monotonic() - began
        end.close()
        expect(trimmed, num_groups, "entries trimmed")
        empty(client)
        return total / took_s / MEGABYTE

    found = in_turns(
        bench.settings.rounds,
        {
            "loopback": lambda: loopback_mb_per_s(bench, payload_bytes, num_groups),
            "undecoded": lambda: reader(decodes=False),
            "decoded": lambda: reader(decodes=True),
        },
    )
    rows = (("XREAD and commit", "undecoded", Goal(at_least=READ_GOAL)),
            ("the same, decoded, checked and settled", "decoded", None))  # fmt: skip
    return [
        compare_rounds(
            f"{name}, {kilobytes} kB",
            found[measured],
            found["loopback"],
            reference_is=f"Python TCP loopback: sendall of as many bytes, recv_into of {RECEIVE_BYTES // KILOBYTES} kB",
            unit="MB/s",
            goal=goal,
            details={"payload_bytes": payload_bytes, "num_groups": num_groups},
        )
        for name, measured, goal in rows
    ]


def producers_figures(bench: Bench) -> list[Figure]:
    """Compares many producers on one stream with one, with equally many groups in all."""
    group_bytes = 16 * KILOBYTES
    payload_bytes = len(encode_group(group_of(group_bytes)))
    num_groups = NUM_PRODUCERS * max(2, groups_for(bench, payload_bytes) // NUM_PRODUCERS)
    with bench_server(bench, "producers") as (url, client):

        def appended(num_producers: int, burst: int, num_processes: int) -> float:
            release_prompts(client, KEYS, num_groups)
            children = {}
            for name in [f"load-{n}" for n in range(num_processes)]:
                job = Append(
                    url=url,
                    run=KEYS.run,
                    name=name,
                    num_writers=num_producers // num_processes,
                    groups_per_writer=num_groups // num_producers,
                    burst=burst,
                    group_bytes=group_bytes,
                )
                children[name] = start_apart(name, "bench.stream.load:append", job, bench.folder)
            while client.llen(READY) < num_processes and not any(child.poll() for child in children.values()):
                time.sleep(0.01)
            client.rpush(GO, *children)
            wait_for(list(children.values()))
            spans = [found_apart(name, Span, bench.folder) for name in children]
            expect(client.xlen(KEYS.rollouts), num_groups, "entries appended")
            empty(client)
            return num_groups / (max(ended for _, ended in spans) - min(began for began, _ in spans))

        measures = {
            "one": lambda: appended(1, num_groups, 1),
            "bursts": lambda: appended(NUM_PRODUCERS, BURST, NUM_LOAD_PROCESSES),
        }
        found = in_turns(bench.settings.rounds, measures)
    return [
        compare_rounds(
            f"{NUM_PRODUCERS} producers on one stream, 16 kB, {BURST} groups each at a time",
            found["bursts"],
            found["one"],
            reference_is="one producer that is handed as many groups at once",
            goal=Goal(at_least=PRODUCERS_GOAL),
            details={
                "payload_bytes": payload_bytes,
                "num_groups": num_groups,
                "what": "each producer has a writer, claims and a connection of its own; encoding included",
            },
        )
    ]


STREAM = BenchSection(
    "stream",
    {
        "records": lambda bench: record_figures(),
        "xadd": append_figures,
        "read": read_figures,
        "producers": producers_figures,
    },
    StreamSettings(),
    quick=StreamSettings(rounds=2, payload_mb=3.0),
)
