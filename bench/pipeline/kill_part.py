"""The processes of the row about killed producers: the one that measures, and `python -m bench.pipeline.kill_part
RUN.toml TALLY`, a producer that is killed."""

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from vllm import SamplingParams

import penstock.producers.__main__ as producer_entry
from bench.feeder import make_manifest
from bench.part import tell
from bench.pipeline.bare import Meter
from bench.pipeline.kills import GROUPS, LENGTHS, Kill, Killed, KillJob, Spell
from bench.pipeline.long_rollouts import LongRollouts
from bench.pipeline.saving import SavingMeter, SocketClock, until
from bench.running import open_producer
from bench.section import ended_early
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import ReleasedTask
from penstock.consumers.stream.scripts import Scripts
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.run_folder import resolved_toml
from penstock.producers.engines.vllm import VllmEngine
from penstock.producers.interfaces import Completion
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.rollout.episode import load_tokenizer
from penstock.producers.rollout.run_environments import open_environments
from penstock.schemas.config import RunConfig, load_config
from penstock.schemas.keys import Field, Keys
from penstock.schemas.rollout import SamplingSettings, decode_group
from penstock.schemas.weights.stores import RedisChunks

LOOK_S = 0.05
"""How often the victim counts its tokens."""
MANY_GROUPS = 1000
"""More than are sampled while nothing fails."""


class EndlessEngine(VllmEngine):
    """No end of sequence ends a rollout."""

    async def _run(self, ids: list[int], params: SamplingParams, *arguments: Any) -> list[Completion]:
        params.ignore_eos = True
        return await super()._run(ids, params, *arguments)


class Victim(Meter):
    """Kills its own process once it has sampled `num_tokens`, after writing the exact number to `tally`."""

    def __init__(self, engine: VllmEngine, tally: Path, num_tokens: int) -> None:
        super().__init__(engine)
        self._tally = tally
        self._num_tokens = num_tokens
        self._running: set[str] = set()
        self._watching = asyncio.create_task(self._watch())

    async def generate(
        self, prompt_token_ids: list[int], sampling: SamplingSettings, num_siblings: int, request_id: str, *more: Any
    ) -> list[Completion]:
        self._running.add(request_id)
        try:
            return await super().generate(prompt_token_ids, sampling, num_siblings, request_id, *more)
        finally:
            self._running.discard(request_id)

    def _num_sampled(self) -> int | None:
        """Counts the tokens since the start; None while a request begins or ends, when vLLM reports none."""
        running = [self._engine.sampled(request_id) for request_id in self._running]
        if not all(running):
            return None
        ended = sum(num_tokens for _, _, num_tokens in self.requests)
        return ended + sum(len(one.token_ids) for found in running for one in found) // 4

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if (num_sampled := self._num_sampled() or 0) >= self._num_tokens:
                self._tally.write_text(str(num_sampled))
                os.kill(os.getpid(), signal.SIGKILL)


async def measure(job: KillJob) -> Killed:
    """Boots one engine, which takes over from every victim."""
    config = load_config(Path(job.run_file))
    engine = await EndlessEngine.start(config, seed=1)
    off = replace(config, producers=replace(config.producers, progress_s=0.0))
    tell("the engine serves")
    ways = _Ways(job, engine, {"with": config, "without": off})
    try:
        return Killed(
            progress_s=config.producers.progress_s,
            num_rollouts=GROUPS * config.group_size,
            spells=await ways.spells(),
            lengths=await ways.lengths(),
            kills=await ways.kills(),
        )
    finally:
        await engine.close()


class _Ways:
    """Runs of a few prompts each, with progress and without."""

    def __init__(self, job: KillJob, engine: VllmEngine, configs: dict[str, RunConfig]) -> None:
        self._job = job
        self._engine = engine
        self._configs = configs
        self._numbers = itertools.count()
        self._sockets = SocketClock(asyncio.get_running_loop())
        config = configs["with"]
        self._environments = open_environments(config)
        self._tokenizer = load_tokenizer(config)

    async def spells(self) -> list[Spell]:
        async with self._alone(Meter(self._engine), MANY_GROUPS) as saving:
            found = [await saving.spell(self._job.spell_s) for _ in range(self._job.spells)]
        tell(f"{len(found)} spells of {self._job.spell_s:g} s")
        return found

    async def lengths(self) -> dict[int, Spell]:
        found: dict[int, Spell] = {}
        for num_tokens in LENGTHS:
            async with self._alone(LongRollouts(self._engine, num_tokens, self._job.length_s)) as saving:
                found[num_tokens] = await saving.spell(self._job.length_s)
            tell(f"rollouts of {num_tokens:,} tokens")
        return found

    async def kills(self) -> dict[str, list[Kill]]:
        found: dict[str, list[Kill]] = {name: [] for name in self._configs}
        for n in range(self._job.kills):
            for name in list(self._configs)[:: -1 if n % 2 else 1]:
                found[name].append(await self._kill(self._named(name)))
                tell(f"kill {n + 1} {name} progress: the last group after {found[name][-1].arrival_s:.1f} s")
        return found

    def _named(self, name: str) -> RunConfig:
        return replace(self._configs[name], name=f"kills-{next(self._numbers)}")

    @asynccontextmanager
    async def _alone(self, engine: Meter, num_groups: int = GROUPS) -> AsyncIterator[SavingMeter]:
        """Serves with a producer that saves progress, once the time between saves has settled."""
        config = self._named("with")
        async with self._released(config, num_groups), self._served(config, engine) as saving:
            await until(lambda: saving.num_saves > 4)
            yield saving

    async def _kill(self, config: RunConfig) -> Kill:
        folder = config.folder(Path(self._job.runs))
        folder.mkdir(parents=True)
        run_file, tally = folder / "run.toml", folder / "tally"
        run_file.write_text(resolved_toml(config))
        async with self._released(config) as client:
            command = [sys.executable, "-m", "bench.pipeline.kill_part", str(run_file), str(tally)]
            victim = Child("victim", command, log=folder / "victim.log")
            await until(lambda: victim.poll() is not None)
            killed_s = time.monotonic()
            if victim.returncode != -signal.SIGKILL:
                raise ended_early(victim)
            meter = Meter(self._engine)
            async with self._served(config, meter):
                await until(lambda: client.xlen(Keys(config.name).rollouts) == GROUPS)
                arrival_s = time.monotonic() - killed_s
            entries: Any = client.xrange(Keys(config.name).rollouts)
        groups = [decode_group(fields[Field.PAYLOAD]) for _, fields in entries]
        total = sum(rollout.num_sampled_tokens for group in groups for rollout in group.rollouts)
        num_sampled, num_kept = int(tally.read_text()), total - sum(tokens for _, _, tokens in meter.requests)
        return Kill(num_sampled=num_sampled, num_lost=num_sampled - num_kept, arrival_s=arrival_s)

    @asynccontextmanager
    async def _released(self, config: RunConfig, num_groups: int = GROUPS) -> AsyncIterator[Any]:
        """Stands in for the trainer: announces policy 0 and releases `num_groups` prompts."""
        connection, keys = TrainerConnection(os.environ["REDIS_URL"], outage_s=10.0), Keys(config.name)
        scripts = Scripts(connection, keys)
        try:
            scripts.open_epoch(0)
            weights = Path(config.model.path) / "model.safetensors"
            manifest = make_manifest(weights, RedisChunks(connection.call, keys))
            scripts.announce(0, msgspec.json.encode(manifest), b"", 0)
            (name,) = config.every_environment
            scripts.release(0, [ReleasedTask(name, n) for n in range(1, num_groups + 1)], 0)
            yield connection.client
        finally:
            connection.client.flushdb()
            connection.close()

    @asynccontextmanager
    async def _served(self, config: RunConfig, meter: Meter) -> AsyncIterator[SavingMeter]:
        metrics = ProducerMetrics()
        opened = open_producer(config, Path(self._job.runs), meter, self._environments, self._tokenizer, metrics)
        async with opened as producer:
            saving = SavingMeter(producer, metrics, self._sockets)
            await producer.open()
            async with asyncio.TaskGroup() as serving:
                serving.create_task(producer.serve())
                yield saving
                producer.stop.set()


def be_the_victim(run_file: Path, tally: Path) -> int:
    """Runs a producer that is killed when its rollouts are half sampled."""
    config = load_config(run_file)
    half = GROUPS * config.group_size * config.sampling.max_tokens // 2

    async def start(config: RunConfig, *, seed: int) -> Victim:
        return Victim(await EndlessEngine.start(config, seed=seed), tally, half)

    return producer_entry.main(config, runs=tally.parent, producer_id="victim", engine_factory=start)


if __name__ == "__main__":
    sys.exit(be_the_victim(*map(Path, sys.argv[1:])))
