"""Producer tokens/s while streaming and updating, window by window against the bare AsyncLLM in the same process."""

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import msgspec
import redis

from bench.pipeline.bare import BareEngine, Meter, tokens_between
from bench.running import open_producer
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.redis_server import connect
from penstock.deploy.launch.run_folder import resolved_toml
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
    """The figures of one window. The bare engine has neither updates nor appends."""

    tokens_per_s: float
    paused_share: float = 0.0
    num_updates: int = 0
    pause_s: float | None = None
    groups_appended_per_s: float | None = None


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """One load at one rate of updates against the bare engine.

    ratio: median over the rounds of window / mean of the bare windows before and after it.
    """

    load: str
    updates_per_s: float
    tokens_per_s: float
    bare_tokens_per_s: float
    ratio: float
    ratio_by_round: tuple[float, ...]
    paused_share: float
    pause_s: float | None
    groups_appended_per_s: float
    num_updates: int


async def measure_streaming(settings: StreamingSettings) -> list[Streamed]:
    """Boots one engine and takes every load's windows in turn: bare, each rate of updates, bare, and so on."""
    from penstock.producers.engines.vllm import VllmEngine

    config = load_config(Path(settings.run_file))
    engine = await VllmEngine.start(config, seed=1)
    try:
        return [
            result for load in settings.loads for result in await _Windows(config, settings, load, engine).compare()
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

    async def compare(self) -> list[Streamed]:
        bare: list[Window] = []
        streaming: dict[float, list[Window]] = {rate: [] for rate in self._settings.updates_per_s}
        for _ in range(self._settings.rounds):
            bare.append(await self._bare_window())
            for rate, windows in streaming.items():
                windows.append(await self._streaming_window(rate))
        bare.append(await self._bare_window())
        return [summarize(self._load.name, rate, windows, bare) for rate, windows in streaming.items()]

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
        feeder = self._start_feeder(config, updates_per_s)
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
            num_updates=len(pauses),
            pause_s=median(pauses) if pauses else None,
            groups_appended_per_s=num_appended / (end - start),
        )

    def _start_feeder(self, config: RunConfig, updates_per_s: float) -> Child:
        folder = config.folder(self._run_folders)
        folder.mkdir(parents=True)
        run_file, weights = folder / "run.toml", Path(config.model.path) / "model.safetensors"
        run_file.write_text(resolved_toml(config))
        command = [sys.executable, "-m", "bench.feeder", str(run_file), "--weights", str(weights)]
        return Child("feeder", [*command, "--updates-per-s", str(updates_per_s)], log=folder / "feeder.log")

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


def summarize(load: str, updates_per_s: float, windows: list[Window], bare: list[Window]) -> Streamed:
    """Compares windows with the bare ones around them: `bare` holds one more than `windows`."""
    references = [mean((before.tokens_per_s, after.tokens_per_s)) for before, after in itertools.pairwise(bare)]
    ratios = [window.tokens_per_s / reference for window, reference in zip(windows, references, strict=True)]
    pauses = [window.pause_s for window in windows if window.pause_s is not None]
    return Streamed(
        load=load,
        updates_per_s=updates_per_s,
        tokens_per_s=median(window.tokens_per_s for window in windows),
        bare_tokens_per_s=median(references),
        ratio=median(ratios),
        ratio_by_round=tuple(ratios),
        paused_share=mean(window.paused_share for window in windows),
        pause_s=median(pauses) if pauses else None,
        groups_appended_per_s=mean(window.groups_appended_per_s or 0.0 for window in windows),
        num_updates=sum(window.num_updates for window in windows),
    )
