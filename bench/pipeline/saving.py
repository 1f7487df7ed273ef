"""The processor time that saving the progress of rollouts takes from a producer: its own steps, timed one by one."""

import asyncio
import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.machine import children_cpu_s
from bench.pipeline.kills import Spell
from penstock.producers.loop import Producer
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.timed_steps import TimedSteps

TICK_S = 0.01
LIMIT_S = 600.0


async def until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError after `LIMIT_S`."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(TICK_S)


class SocketClock:
    """Counts in `cpu_s` the processor seconds that a loop takes to send what sockets did not take at once and to read
    answers: of every stream of the process, an upper bound for the commands of one part. Streams that are already open
    do not count."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.cpu_s = 0.0
        for name in ("_add_reader", "_add_writer"):
            setattr(loop, name, partial(self._add, getattr(loop, name)))

    def _add(self, add: Callable[..., Any], fd: int, callback: Callable[..., Any], *arguments: Any) -> Any:
        if isinstance(getattr(callback, "__self__", None), asyncio.Transport):
            callback = partial(self._timed, callback)
        return add(fd, callback, *arguments)

    def _timed(self, callback: Callable[..., Any], *arguments: Any) -> None:
        began = time.thread_time()
        try:
            callback(*arguments)
        finally:
            self.cpu_s += time.thread_time() - began


class SavingMeter:
    """Measures the saving of a producer that does not serve yet."""

    def __init__(self, producer: Producer, metrics: ProducerMetrics, sockets: SocketClock) -> None:
        self._metrics = metrics
        self._sockets = sockets
        self._saving = TimedSteps(producer.progress.run())
        producer.progress.run = self._run  # type: ignore[method-assign]

    async def _run(self) -> None:
        await self._saving

    @property
    def num_saves(self) -> float:
        """Also those that found nothing new."""
        return self._metrics.registry.get_sample_value("penstock_progress_write_seconds_count") or 0.0

    async def spell(self, seconds: float) -> Spell:
        """Lasts `seconds` and until it has saved once more: begun after a saving, it has as many as belong in it."""
        before = self._count()
        await asyncio.sleep(seconds)
        num_saves = self.num_saves
        await until(lambda: self.num_saves > num_saves)
        return Spell(*map(operator.sub, self._count(), before))

    def _count(self) -> tuple[float, ...]:
        """The fields of `Spell`, since the start."""
        num_bytes = self._metrics.registry.get_sample_value("penstock_progress_bytes_total") or 0.0
        return (
            time.monotonic(),
            time.process_time() + children_cpu_s(),
            self._saving.cpu_s,
            self._sockets.cpu_s,
            self.num_saves,
            num_bytes,
        )
