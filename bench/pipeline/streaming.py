"""Producer tokens/s while streaming and updating, window by window against the bare AsyncLLM in the same process."""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import msgspec
import redis

from bench.pipeline.bare import BareEngine, Meter, tokens_between
from bench.result import Figure, Goal, compare_rounds
from bench.running import open_producer, start_feeder
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.redis_server import connect
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.rollout.run_environments import open_environments
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.keys import Keys

if TYPE_CHECKING:
    from penstock.producers.engines.vllm import VllmEngine

NUM_PROMPTS = 1024


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One way to load the engine.

    ramp_s: from the first request to the window, in which requests that began together drift apart. margin_s: from the
    window to the last new request, so that requests running at the window's end finish under the same load.
    """

    name: str
    max_tokens: int
    ramp_s: float
    margin_s: float


class StreamingSettings(msgspec.Struct, frozen=True, kw_only=True):
    run_file: str
    runs: str
    loads: tuple[Load, ...]
    updates_per_s: tuple[float, ...]
    rounds: int
    window_s: float


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one window. pauses_s: of the updates in it; the bare engine has none."""

    tokens_per_s: float
    paused_share: float = 0.0
    pauses_s: list[float] = []
    groups_appended_per_s: float = 0.0


async def measure_streaming(settings: StreamingSettings) -> list[Figure]:
    """Boots one engine and takes every load's windows in turn: bare, each rate of updates, bare, and so on."""
    from penstock.producers.engines.vllm import VllmEngine

    config = load_config(Path(settings.run_file))
    engine = await VllmEngine.start(config, seed=1)
    try:
        return [
            figure for load in settings.loads for figure in await _Windows(config, settings, load, engine).compare()
        ]
    finally:
        await engine.close()


class _Windows:
    def __init__(self, config: RunConfig, settings: StreamingSettings, load: Load, engine: "VllmEngine") -> None:
        sampling = msgspec.structs.replace(config.sampling, max_tokens=load.max_tokens)
        self._config = msgspec.structs.replace(config, sampling=sampling)
        self._settings = settings
        self._load = load
        self._engine = engine
        self._bare = BareEngine(engine, sampling, config.group_size)
        self._environments = open_environments(config)
        (only,) = self._environments
        self._tokenizer = load_tokenizer(config)
        texts = [only.environment.prompt(index).text for index in range(1, NUM_PROMPTS + 1)]
        self._prompts = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        self._run_folders = Path(settings.runs)
        self._numbers = itertools.count()

    async def compare(self) -> list[Figure]:
        bare: list[Window] = []
        streaming: dict[float, list[Window]] = {rate: [] for rate in self._settings.updates_per_s}
        for _ in range(self._settings.rounds):
            bare.append(await self._bare_window())
            for rate, windows in streaming.items():
                windows.append(await self._streaming_window(rate))
        bare.append(await self._bare_window())
        goal_rate = self._settings.updates_per_s[0]
        return [
            figure
            for rate, windows in streaming.items()
            for figure in streaming_figures(f"{self._load.name}, {rate:g} updates/s", windows, bare, rate == goal_rate)
        ]

    async def _bare_window(self) -> Window:
        stop = asyncio.Event()
        load = asyncio.create_task(
            self._bare.generate(self._prompts, self._config.producers.groups_in_flight, stop), name="bare"
        )
        start, end, _ = await self._wait()
        stop.set()
        return Window(tokens_per_s=tokens_between(await load, start, end) / (end - start))

    async def _streaming_window(self, updates_per_s: float) -> Window:
        """Measures a complete producer in a run of its own, from its first claim to its shutdown."""
        config = msgspec.structs.replace(self._config, name=f"bench-{self._load.max_tokens}-{next(self._numbers)}")
        meter = Meter(self._engine)
        feeder = start_feeder(config, self._run_folders / config.name, updates_per_s)
        client = connect(os.environ["REDIS_URL"])
        opened = open_producer(config, self._run_folders, meter, self._environments, self._tokenizer, ProducerMetrics())
        try:
            async with opened as producer:
                await producer.open()
                serving = asyncio.create_task(producer.serve(), name="producer")
                await self._wait_for_first_request(meter, serving, feeder)
                stream = Keys(config.name).rollouts
                start, end, num_appended = await self._wait(lambda: _num_appended(client, stream))
                producer.stop.set()
                await serving
        finally:
            feeder.kill()
            client.flushdb()
            client.close()
        pauses = [pause_s for ended, pause_s in meter.pauses if start <= ended < end]
        return Window(
            tokens_per_s=tokens_between(meter.requests, start, end) / (end - start),
            paused_share=sum(pauses) / (end - start),
            pauses_s=pauses,
            groups_appended_per_s=num_appended / (end - start),
        )

    async def _wait_for_first_request(self, meter: Meter, serving: "asyncio.Task[None]", feeder: Child) -> None:
        while not meter.requests:
            if serving.done():
                serving.result()
                raise RuntimeError("the producer stopped before it sampled anything")
            if feeder.poll() is not None:
                raise RuntimeError(f"the feeder ended:\n{feeder.last_lines()}")
            await asyncio.sleep(0.01)

    async def _wait(self, count: Callable[[], int] = lambda: 0) -> tuple[float, float, int]:
        """Waits a ramp, a window and a margin; returns when the window began and ended, and what `count` grew by."""
        await asyncio.sleep(self._load.ramp_s)
        start, before = time.monotonic(), count()
        await asyncio.sleep(self._settings.window_s)
        end, after = time.monotonic(), count()
        await asyncio.sleep(self._load.margin_s)
        return start, end, after - before


def _num_appended(client: "redis.Redis", stream: str) -> int:
    info: Any = client.xinfo_stream(stream)
    return info["entries-added"]


def streaming_figures(where: str, windows: list[Window], bare: list[Window], has_goal: bool) -> Iterator[Figure]:
    """Compares tokens/s with the bare windows around each, of which there is one more; and the share of time paused."""
    references = [mean((before.tokens_per_s, after.tokens_per_s)) for before, after in itertools.pairwise(bare)]
    pauses_s = [pause_s for window in windows for pause_s in window.pauses_s]
    yield compare_rounds(
        f"producer tokens/s, {where}",
        [window.tokens_per_s for window in windows],
        references,
        reference_is="bare AsyncLLM in the same process: no Redis, no updates",
        goal=Goal(at_least=0.97) if has_goal else None,
        details={
            "num_updates": len(pauses_s),
            "pause_s": median(pauses_s) if pauses_s else None,
            "groups_appended_per_s": mean(window.groups_appended_per_s for window in windows),
        },
    )
    paused = 100 * mean(window.paused_share for window in windows)
    yield Figure(f"share of time paused, {where}", unit="%", measured=paused)
