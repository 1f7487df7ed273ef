"""Rates at which groups get onto the stream and off it, against the server and the network with the same bytes."""

import asyncio
import time
from urllib.parse import urlsplit

from bench.result import BenchError, Figure, Goal, compare_rounds, in_turns
from bench.section import Bench
from bench.stream.ends import TrainerEnd, append_groups, fill, group_of, release_prompts
from bench.stream.load import GROUPS_IN_FLIGHT, Append, LoadProcess
from bench.stream.measuring import (
    MEGABYTE,
    BenchServer,
    bench_server,
    empty,
    groups_for,
    load_processes,
)
from bench.stream.references import (
    RECEIVE_BYTES,
    add_benchmark_user,
    benchmark_xadd,
    benchmark_xread,
    loopback_mb_per_s,
    open_tcp_port,
)
from penstock.consumers.stream.reader import ENTRIES_PER_READ, READ_BYTES
from penstock.producers.stream.in_flight import SHARE
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import encode_group

KEYS = Keys("bench")
KILOBYTES = 1024
MIN_REQUESTS = 250
"""redis-benchmark takes its time in whole milliseconds."""
APPEND_GOALS = {16: 0.4, 64: 0.6}
"""Kilobytes of an entry to the goal."""
READ_KILOBYTES = (16, 64, 256)
READ_GOAL = 0.5
NUM_PRODUCERS = 64
BURST = GROUPS_IN_FLIGHT // SHARE
"""Groups that finish together in one producer: the number that it claims at once."""
NUM_LOAD_PROCESSES = 2
PRODUCERS_GOAL = 0.9


def append_figures(bench: Bench) -> list[Figure]:
    """Compares XADD by the producer's writer with `redis-benchmark` with one client, both on the UNIX socket."""
    figures = []
    with bench_server(bench, "xadd") as server:
        add_benchmark_user(server.client)
        for kilobytes, at_least in APPEND_GOALS.items():
            figures += _append_figures(bench, server, kilobytes, at_least)
    return figures


def _append_figures(bench: Bench, server: BenchServer, kilobytes: int, at_least: float) -> list[Figure]:
    group = group_of(kilobytes * KILOBYTES)
    payload_bytes = len(encode_group(group))
    num_groups = groups_for(bench, payload_bytes)

    def benchmark() -> float:
        socket_path = server.client.connection_pool.connection_kwargs["path"]
        num_requests = max(MIN_REQUESTS, num_groups)
        rate = benchmark_xadd(socket_path, KEYS.rollouts, payload_bytes, num_requests)
        if server.client.xlen(KEYS.rollouts) != num_requests:
            raise BenchError(f"redis-benchmark appended {server.client.xlen(KEYS.rollouts)}, expected {num_requests}")
        empty(server.client)
        return rate

    def writer(singly: bool) -> float:
        release_prompts(server.client, KEYS, num_groups)
        began, ended = asyncio.run(append_groups(server.url, KEYS, group, num_groups, singly=singly))
        if server.client.xlen(KEYS.rollouts) != num_groups or server.client.xlen(KEYS.prompts):
            raise BenchError(f"{server.client.xlen(KEYS.rollouts)} entries appended, expected {num_groups}")
        empty(server.client)
        return num_groups / (ended - began)

    found = in_turns(
        bench.settings.rounds,
        {"benchmark": benchmark, "waiting": lambda: writer(singly=False), "single": lambda: writer(singly=True)},
    )
    against = "redis-benchmark -c 1: XADD of as many bytes, one at a time"
    details = {"payload_bytes": payload_bytes, "num_groups": num_groups, "link": "UNIX socket"}
    appends = "each group in a MULTI with its prompt's XACK and XDEL"
    return [
        compare_rounds(
            f"XADD by the writer, {kilobytes} kB",
            found["waiting"],
            found["benchmark"],
            reference_is=against,
            goal=Goal(at_least=at_least),
            details={**details, "what": f"groups that wait, encoded; {appends}, several in one"},
        ),
        compare_rounds(
            f"the same, one group at a time, {kilobytes} kB",
            found["single"],
            found["benchmark"],
            reference_is=against,
            details={**details, "what": f"encoded and appended when the one before is in Redis; {appends}"},
        ),
    ]


def read_figures(bench: Bench) -> list[Figure]:
    """Compares the trainer's reader and its commit with a plain TCP connection, both over loopback."""
    figures = []
    with bench_server(bench, "read") as server, load_processes(bench, server, "sender") as (sender,):
        add_benchmark_user(server.client)
        port = open_tcp_port(server.client)
        for kilobytes in READ_KILOBYTES:
            figures += _read_figures(bench, server, port, sender, kilobytes)
    return figures


def _read_figures(bench: Bench, server: BenchServer, port: int, sender: LoadProcess, kilobytes: int) -> list[Figure]:
    group = group_of(kilobytes * KILOBYTES)
    payload_bytes = len(encode_group(group))
    num_groups = groups_for(bench, payload_bytes)
    url = f"redis://:{urlsplit(server.url).password}@127.0.0.1:{port}"

    def benchmark() -> float:
        fill(server.client, KEYS, group, num_groups)
        per_read = max(1, min(ENTRIES_PER_READ, READ_BYTES // payload_bytes))
        rate = benchmark_xread(port, KEYS.rollouts, per_read, max(MIN_REQUESTS, num_groups // per_read))
        empty(server.client)
        return rate * payload_bytes / MEGABYTE

    def reader(decodes: bool) -> float:
        total = fill(server.client, KEYS, group, num_groups)
        end = TrainerEnd(url, KEYS, num_groups, decodes=decodes)
        began = time.monotonic()
        while end.num_read < num_groups:
            end.read(block=False)
        trimmed = end.acknowledge()
        took_s = time.monotonic() - began
        end.close()
        if trimmed != num_groups:
            raise BenchError(f"{trimmed} entries trimmed, expected {num_groups}")
        empty(server.client)
        return total / took_s / MEGABYTE

    found = in_turns(
        bench.settings.rounds,
        {
            "loopback": lambda: loopback_mb_per_s(sender, payload_bytes, num_groups),
            "undecoded": lambda: reader(decodes=False),
            "benchmark": benchmark,
            "decoded": lambda: reader(decodes=True),
        },
    )
    against = f"Python TCP loopback: sendall of as many bytes, recv_into of {RECEIVE_BYTES // KILOBYTES} kB"
    details = {"payload_bytes": payload_bytes, "num_groups": num_groups, "link": "TCP loopback"}
    return [
        compare_rounds(
            f"XREAD and commit, {kilobytes} kB",
            found["undecoded"],
            found["loopback"],
            reference_is=against,
            unit="MB/s",
            goal=Goal(at_least=READ_GOAL),
            details={**details, "what": "the reader's reads from cursor to end, then the commit that trims them"},
        ),
        compare_rounds(
            f"the same, against redis-benchmark, {kilobytes} kB",
            found["undecoded"],
            found["benchmark"],
            reference_is="redis-benchmark -c 1: XREAD of as many entries, which it does not look at",
            unit="MB/s",
            details=details,
        ),
        compare_rounds(
            f"the same, decoded, checked and settled, {kilobytes} kB",
            found["decoded"],
            found["loopback"],
            reference_is=against,
            unit="MB/s",
            details={**details, "num_siblings": len(group.rollouts)},
        ),
    ]


def producers_figures(bench: Bench) -> list[Figure]:
    """Compares many producers on one stream with one, with equally many groups in all."""
    group_bytes = 16 * KILOBYTES
    payload_bytes = len(encode_group(group_of(group_bytes)))
    per_producer = max(2, groups_for(bench, payload_bytes) // NUM_PRODUCERS)
    num_groups = per_producer * NUM_PRODUCERS
    names = [f"load-{n}" for n in range(NUM_LOAD_PROCESSES)]
    with bench_server(bench, "producers") as server, load_processes(bench, server, *names) as processes:

        def appended(num_producers: int, burst: int, loads: list[LoadProcess]) -> float:
            release_prompts(server.client, KEYS, num_groups)
            job = Append(
                run=KEYS.run,
                num_writers=num_producers // len(loads),
                groups_per_writer=num_groups // num_producers,
                burst=burst,
                group_bytes=group_bytes,
            )
            for load in loads:
                load.prepare(job)
            for load in loads:
                load.go()
            spans = [load.result() for load in loads]
            if server.client.xlen(KEYS.rollouts) != num_groups:
                raise BenchError(f"{server.client.xlen(KEYS.rollouts)} entries appended, expected {num_groups}")
            empty(server.client)
            return num_groups / (max(ended for _, ended in spans) - min(began for began, _ in spans))

        found = in_turns(
            bench.settings.rounds,
            {
                "one": lambda: appended(1, num_groups, processes[:1]),
                "bursts": lambda: appended(NUM_PRODUCERS, BURST, processes),
                "all at once": lambda: appended(NUM_PRODUCERS, per_producer, processes),
            },
        )
    details = {
        "payload_bytes": payload_bytes,
        "num_groups": num_groups,
        "num_processes": NUM_LOAD_PROCESSES,
        "link": "UNIX socket",
        "what": "each producer has a writer, claims and a connection of its own; encoding included",
    }
    return [
        compare_rounds(
            f"{NUM_PRODUCERS} producers on one stream, 16 kB, {handed_over}",
            found[which],
            found["one"],
            reference_is="one producer that is handed as many groups at once",
            goal=goal,
            details=details,
        )
        for which, handed_over, goal in (
            ("bursts", f"{BURST} groups each at a time", Goal(at_least=PRODUCERS_GOAL)),
            ("all at once", f"{per_producer} groups each at once", None),
        )
    ]
