"""The processor time that saving the progress of rollouts takes from a producer: its own steps, timed one by one."""

import asyncio
import time
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import msgspec

from bench.machine import children_cpu_s
from bench.result import Figure, Goal
from bench.running import NEVER_PER_S, open_producer, start_feeder
from penstock.producers.interfaces import Completion
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.rollout.run_environments import open_environments
from penstock.schemas.config import load_config

GROUPS = 4
"""In flight."""
TICK_S = 0.1
LIMIT_S = 600.0


class SavingJob(msgspec.Struct, frozen=True, kw_only=True):
    run_file: str
    runs: str
    seconds: float


class StepClock:
    """Awaits a coroutine, once, and counts in `cpu_s` the processor seconds of its own steps, including coroutines that
    it awaits. What runs while it waits does not count."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.cpu_s = 0.0
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        resume, value = self._coroutine.send, None
        while True:
            began = time.thread_time()
            try:
                waits_for = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self.cpu_s += time.thread_time() - began
            try:
                resume, value = self._coroutine.send, (yield waits_for)
            except BaseException as error:  # a cancellation, which the coroutine must see
                resume, value = self._coroutine.throw, error


async def measure_saving(job: SavingJob) -> Figure:
    """Runs a producer on endless rollouts, and measures from its fifth saving on."""
    from penstock.producers.engines.vllm import VllmEngine

    class EndlessEngine(VllmEngine):
        """No end of sequence ends a rollout."""

        async def _run(self, ids: list[int], params: Any, *arguments: Any) -> list[Completion]:
            params.ignore_eos = True
            return await super()._run(ids, params, *arguments)

    config, metrics = load_config(Path(job.run_file)), ProducerMetrics()
    engine = await EndlessEngine.start(config, seed=1)
    environments, tokenizer = open_environments(config), load_tokenizer(config)

    def num_saves() -> float:
        return metrics.registry.get_sample_value("penstock_progress_write_seconds_count") or 0.0

    async def wait_for_save(number: float) -> None:
        async with asyncio.timeout(LIMIT_S):
            while num_saves() < number:  # noqa: ASYNC110 - a metric, that nothing announces
                await asyncio.sleep(TICK_S)

    feeder = start_feeder(config, Path(job.runs) / config.name, NEVER_PER_S)
    try:
        async with (
            open_producer(config, Path(job.runs), engine, environments, tokenizer, metrics) as producer,
            asyncio.TaskGroup() as serving,
        ):
            saving = StepClock(producer.progress.run())

            async def run() -> None:
                await saving

            producer.progress.run = run  # type: ignore[method-assign]
            await producer.open()
            serving.create_task(producer.serve())
            await wait_for_save(5)
            before = saving.cpu_s, time.process_time() + children_cpu_s(), num_saves()
            await asyncio.sleep(job.seconds)
            await wait_for_save(num_saves() + 1)
            after = saving.cpu_s, time.process_time() + children_cpu_s(), num_saves()
            producer.stop.set()
    finally:
        feeder.end()
        await engine.close()
    return Figure(
        f"processor seconds of saving progress, {GROUPS * config.group_size} rollouts of "
        f"{config.sampling.max_tokens:,} tokens",
        unit="s",
        measured=after[0] - before[0],
        reference=after[1] - before[1],
        reference_is="all that the producer's processes take",
        goal=Goal(at_most=0.01),
        details={"num_saves": after[2] - before[2], "seconds": job.seconds},
    )
