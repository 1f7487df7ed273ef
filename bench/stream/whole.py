"""Rollouts end to end against PipelineRL's way of streaming them, and their memory in the server."""

import asyncio
import time
from functools import partial
from typing import Any

import redis

from bench.pipeline.records import GROUP_SIZE
from bench.result import BenchError, Figure, Goal, compare, compare_rounds, in_turns
from bench.section import Bench
from bench.stream.ends import TrainerEnd, append_groups, group_of, plain_client, release_prompts
from bench.stream.load import LoadProcess, PeerWrite, Produce
from bench.stream.measuring import MEGABYTE, BenchServer, bench_server, empty, load_processes
from bench.stream.peer import Form, PeerReader
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import RolloutGroup, encode_group

KEYS = Keys("bench")
PEER_STREAM = "bench:peer"
COMPLETION_TOKENS = 1024
PEER_GOALS: dict[Form, float] = {"arrays": 5.0, "lists": 2.5}
"""By the form in which the engine returns numbers to the producer."""
MEMORY_KILOBYTES = (16, 20, 64, 80, 256)
"""Round numbers, and some just above a size class of the server's allocator."""
MEMORY_MB = 32.0
MEMORY_GOAL = 1.3


def peer_figures(bench: Bench) -> list[Figure]:
    """Rollouts per second from a writing process to a reading one, both ways on the same server."""
    num_groups = bench.settings.peer_groups
    num_rollouts = num_groups * GROUP_SIZE
    with bench_server(bench, "peers") as server, load_processes(bench, server, "producer-0") as (process,):

        def ours(form: Form) -> float:
            return num_rollouts / _ours(server, process, num_groups, form)

        def peer(form: Form, by_group: bool) -> float:
            return num_rollouts / _peer(server, process, num_groups, form, by_group=by_group)

        found = in_turns(
            bench.settings.rounds,
            {
                "arrays": partial(ours, "arrays"),
                "rollouts of lists": partial(peer, "lists", False),
                "lists": partial(ours, "lists"),
                "groups of lists": partial(peer, "lists", True),
                "groups of arrays": partial(peer, "arrays", True),
            },
        )
    details = {
        "completion_tokens": COMPLETION_TOKENS,
        "num_siblings": GROUP_SIZE,
        "num_groups": num_groups,
        "link": "UNIX socket",
        "what": "claimed, packed, encoded, appended; read, decoded, checked, settled, committed",
    }
    return [
        compare_rounds(
            f"rollouts/s end to end, {form} handed over, against {records}",
            found[form],
            found[records],
            reference_is=f"PipelineRL's way: {records}, one per XADD, pickled; XREAD COUNT 1; same server",
            goal=Goal(at_least=PEER_GOALS[form]) if records == "rollouts of lists" else None,
            details=details,
        )
        for records in ("rollouts of lists", "groups of lists", "groups of arrays")
        for form in PEER_GOALS
    ]


def _ours(server: BenchServer, process: LoadProcess, num_groups: int, form: Form) -> float:
    """Seconds."""
    release_prompts(server.client, KEYS, num_groups)
    end = TrainerEnd(server.url, KEYS, num_groups)
    process.prepare(Produce(run=KEYS.run, num_groups=num_groups, completion_tokens=COMPLETION_TOKENS, form=form))
    began = time.monotonic()
    process.go()
    while end.num_read < num_groups:
        end.read(block=True)
    end.acknowledge()
    took_s = time.monotonic() - began
    process.result()
    end.close()
    empty(server.client)
    return took_s


def _peer(server: BenchServer, process: LoadProcess, num_groups: int, form: Form, *, by_group: bool) -> float:
    """Seconds."""
    job = PeerWrite(
        stream=PEER_STREAM,
        num_groups=num_groups,
        completion_tokens=COMPLETION_TOKENS,
        form=form,
        by_group=by_group,
    )
    num_records = num_groups * (1 if by_group else GROUP_SIZE)
    with plain_client(server.url) as client:
        reader = PeerReader(client, PEER_STREAM)
        process.prepare(job)
        began = time.monotonic()
        process.go()
        num_rollouts = 0
        for _ in range(num_records):
            record = reader.read()
            num_rollouts += len(record) if by_group else 1
        took_s = time.monotonic() - began
    process.result()
    if num_rollouts != num_groups * GROUP_SIZE:
        raise BenchError(f"the peer read {num_rollouts} rollouts, expected {num_groups * GROUP_SIZE}")
    empty(server.client)
    return took_s


def memory_figures(bench: Bench) -> list[Figure]:
    """Measures the server's memory for groups on the stream, appended by the writer; the worst of several sizes."""
    by_size: dict[str, float] = {}
    worst: tuple[float, float, float] = (0.0, 0.0, 0.0)
    with bench_server(bench, "memory") as server:
        for kilobytes in MEMORY_KILOBYTES:
            used, payload = _weigh(server, group_of(kilobytes * 1024))
            by_size[f"{kilobytes}_kB"] = used / payload
            worst = max(worst, (used / payload, used, payload))
    ratio, used, payload = worst
    return [
        compare(
            "server memory per payload",
            unit="MB",
            measured=used / MEGABYTE,
            reference=payload / MEGABYTE,
            reference_is="the encoded groups' own bytes",
            ratio=ratio,
            goal=Goal(at_most=MEMORY_GOAL),
            details={"what": "growth of used_memory, the worst of these entry sizes", "ratio_by_size": by_size},
        )
    ]


def _weigh(server: BenchServer, group: RolloutGroup) -> tuple[float, float]:
    """Returns the bytes that the server has taken, and the bytes of payload."""
    payload_bytes = len(encode_group(group))
    num_groups = max(8, int(MEMORY_MB * MEGABYTE / payload_bytes))
    empty(server.client)
    release_prompts(server.client, KEYS, num_groups)
    before = _used_memory(server.client)
    asyncio.run(append_groups(server.url, KEYS, group, num_groups))
    return _used_memory(server.client) - before, float(num_groups * payload_bytes)


def _used_memory(client: "redis.Redis") -> float:
    """Waits until it has stopped changing: the server frees the buffers of gone clients within a second or two."""
    before = -1.0
    while True:
        info: Any = client.info("memory")
        now = float(info["used_memory"])
        if abs(now - before) < 0.001 * now:
            return now
        before = now
        time.sleep(0.5)
