"""The stream section: what crossing Redis costs, each figure beside a reference measured in turn with it."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import redis
from penstock.schemas.process.outage import RedisGoneError

from bench.pipeline import scratch
from bench.records import record_figures
from bench.result import BenchError, Figure, Result, describe_machine, now
from bench.stream_rates import append_figures, producers_figures, read_figures
from bench.stream_reliability import reliability_figures
from bench.stream_setup import StreamBench, StreamSettings
from bench.stream_whole import memory_figures, peer_figures


def encode_figures(bench: StreamBench) -> list[Figure]:
    """The one of the records' figures that has a place in this section's table."""
    return [figure for figure in record_figures() if figure.name == "encoding a group"]


STREAM_ROWS: dict[str, Callable[[StreamBench], list[Figure]]] = {
    "encode": encode_figures,
    "xadd": append_figures,
    "read": read_figures,
    "peers": peer_figures,
    "producers": producers_figures,
    "memory": memory_figures,
    "reliability": reliability_figures,
}


def measure_stream(rows: Sequence[str], settings: StreamSettings, run_file: Path, work: Path) -> Result:
    """Measures the named rows of `STREAM_ROWS` in order; scratch goes to a folder under `work` that is removed.

    Raises:
        BenchError, ConfigError, PartDied, ServerError: a row could not be measured.
    """
    machine, date, began = describe_machine(), now(), time.monotonic()
    figures: list[Figure] = []
    with scratch(work) as folder:
        bench = StreamBench(settings, run_file, folder)
        for row in rows:
            print(f"stream: {row} ...", flush=True)
            try:
                figures += STREAM_ROWS[row](bench)
            except (redis.RedisError, RedisGoneError) as error:
                raise BenchError(f"{row}: {error}") from error
    return Result(
        section="stream",
        date=date,
        machine=machine,
        settings={"run_file": os.path.relpath(run_file), **msgspec.to_builtins(settings)},
        wall_s=time.monotonic() - began,
        figures=tuple(figures),
    )
