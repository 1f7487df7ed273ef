"""The cost of traces to a producer: processor time of making and sending them, and tokens/s with and without."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from bench.machine import children_cpu_s
from bench.pipeline.bare import Meter, tokens_between
from bench.result import Figure, Goal
from bench.running import NEVER_PER_S, PRODUCER_ID, open_producer, start_feeder
from penstock.deploy.launch.child import Child
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.rollout.run_environments import open_environments
from penstock.schemas.config import load_config
from penstock.schemas.process.tracing import Span, Tracing

RAMP_S = 3.0


class TracingJob(msgspec.Struct, frozen=True, kw_only=True):
    """rounds: of a window without traces and one with them, each of `window_s`."""

    run_file: str
    runs: str
    rounds: int
    window_s: float


class TimedTracing(Tracing):
    """Counts the processor seconds of making and sending spans in `cpu_s`, and the spans."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cpu_s, self.num_spans = 0.0, 0
        self._send, self._exporter.export = self._exporter.export, self._timed_send  # type: ignore[method-assign]

    def export(self, run_id: str, index: int, spans: Iterable[Span]) -> None:
        began = time.thread_time()
        super().export(run_id, index, spans)
        self.cpu_s += time.thread_time() - began

    def _timed_send(self, spans: Sequence[Any]) -> Any:
        began = time.thread_time()
        result = self._send(spans)
        self.cpu_s += time.thread_time() - began
        self.num_spans += len(spans)
        return result


async def measure_tracing(job: TracingJob) -> Figure:
    """Runs one producer and switches its traces on and off."""
    from penstock.producers.engines.vllm import VllmEngine

    config = load_config(Path(job.run_file))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
    log = Path(job.runs) / "collector.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    collector = Child("collector", [sys.executable, "-m", "bench.pipeline.collector", str(port)], log=log)
    engine = await VllmEngine.start(config, seed=1)
    meter, tracing = Meter(engine), TimedTracing(config, PRODUCER_ID)
    environments, tokenizer = open_environments(config), load_tokenizer(config)
    feeder = start_feeder(config, Path(job.runs) / config.name, NEVER_PER_S)
    windows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    traced_cpu_s = 0.0
    try:
        opened = open_producer(config, Path(job.runs), meter, environments, tokenizer, ProducerMetrics())
        async with opened as producer, asyncio.TaskGroup() as serving:
            await producer.open()
            serving.create_task(producer.serve())
            while not meter.requests:  # noqa: ASYNC110 - the engine's, that nothing announces
                await asyncio.sleep(0.01)
            for is_on in [False, True, True, False] * job.rounds:
                producer.writer._tracing = tracing if is_on else None
                await asyncio.sleep(RAMP_S / 6)
                began, cpu_s = time.monotonic(), time.process_time() + children_cpu_s()
                await asyncio.sleep(job.window_s)
                windows[is_on].append((began, time.monotonic()))
                traced_cpu_s += is_on * (time.process_time() + children_cpu_s() - cpu_s)
            producer.stop.set()
    finally:
        feeder.end()
        collector.end()
        tracing.close()
        await engine.close()
    rates = {
        is_on: [tokens_between(meter.requests, *window) / (window[1] - window[0]) for window in found]
        for is_on, found in windows.items()
    }
    return Figure(
        "processor seconds of traces, of groups with answers of 4 tokens",
        unit="s",
        measured=tracing.cpu_s,
        reference=traced_cpu_s,
        reference_is="all that the producer's processes take",
        goal=Goal(at_most=0.01),
        details={
            "num_spans": tracing.num_spans,
            "tokens_per_s": {"on": mean(rates[True]), "off": mean(rates[False])},
            "ratio_by_pair": [round(on / off, 3) for on, off in zip(rates[True], rates[False], strict=True)],
        },
    )
