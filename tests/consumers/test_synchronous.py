"""A synchronous run gives the same bits again, however many producers it has and whichever answers first."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.schemas.process.cancellation import cancel_and_wait
from penstock.schemas.rollout import SamplingSettings
from penstock.schemas.weights.log import read_log
from producer_thread import Characters, ProducerThread
from scripted_engine import ScriptedEngine
from trainer_bench import TrainerBench
from training_groups import tiny_model

pytestmark = pytest.mark.redis
FIGURES = ("loss", "grad_norm", "entropy", "reward")


class SlowAtOddTasks(ScriptedEngine):
    """Answers the tasks of odd numbers late; its event loop is its thread's."""

    async def _sample(self, prompt_ids: list[int], *rest: Any) -> Any:
        self.token_s = 0.01 * (Characters().encode("1", False)[0] % 2 == prompt_ids[-1] % 2)
        return await super()._sample(prompt_ids, *rest)


def open_bench(url: str, folder: Path, model: Path, *overrides: str) -> TrainerBench:
    folder.mkdir()
    bench = TrainerBench(url, folder)
    bench.overrides = [
        *("mode=synchronous", f"model.path={model}", "num_updates=3", "group_size=4", "trainer.num_minibatches=2"),
        *("trainer.device=cpu", "trainer.learning_rate=0.01", *overrides),
    ]
    return bench


def train(url: str, folder: Path, model: Path, engines: list[ScriptedEngine], *overrides: str) -> list[dict]:
    bench = open_bench(url, folder, model, "evaluation.num_prompts=0", *overrides)
    producers = [
        ProducerThread(bench.config, url, folder, f"producer-{n}", engine=engine) for n, engine in enumerate(engines)
    ]
    try:
        trainer = bench.trainer()
        for producer in producers:
            producer.start()
        assert trainer.run()
        for producer in producers:
            producer.finish()
            assert producer.problem is None
    finally:
        bench.close()
    return bench.lines("updates.jsonl")


def test_a_synchronous_run_is_reproduced_bit_for_bit(redis_url, redis_client, tmp_path) -> None:
    tiny_model(tmp_path / "model", vocab_size=100)
    runs = []
    for name, engines, overrides in (
        ("one", [ScriptedEngine()], ()),
        ("two", [SlowAtOddTasks(), ScriptedEngine(token_s=0.002)], ()),
        ("other seed", [ScriptedEngine()], ("seed=1",)),
    ):
        redis_client.flushall()
        lines = train(redis_url, tmp_path / name, tmp_path / "model", engines, *overrides)
        runs.append([[line[name] for name in FIGURES] for line in lines])
    assert len(runs[0]) == 3 and all(loss for loss, *_ in runs[0])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


async def train_on(engine: Any, url: str, folder: Path, model: Path, *, beside: bool = False) -> list[Any]:
    """Trains in this event loop's process on a running engine, `beside` among requests of others; returns what each
    update and each policy was."""
    bench = open_bench(url, folder, model, "sampling.max_tokens=16", "evaluation.num_prompts=2")
    producer = ProducerThread(bench.config, url, folder, engine=engine)

    async def others() -> None:
        for number in itertools.count():
            await engine.generate([9, 11, number % 40], SamplingSettings(max_tokens=12), 8, f"{folder.name}-{number}")

    tasks = [asyncio.create_task(producer.serve()), *([asyncio.create_task(others())] if beside else [])]
    try:
        assert await asyncio.to_thread(bench.trainer().run)
    finally:
        producer.end()
        await tasks[0]
        await cancel_and_wait(tasks[1:])
        bench.close()
    updates = [[line[name] for name in FIGURES] for line in bench.lines("updates.jsonl")]
    evaluations = [line["reward"] for line in bench.lines("evaluations.jsonl")]
    with redis.Redis.from_url(url, protocol=2) as client:
        announced = read_log(client, bench.keys).announced
    pieces = {version: str([chunk.pieces for chunk in each.chunks]) for version, each in announced.items()}
    return [updates, evaluations, pieces]


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server_binary", ["redis"], indirect=True)
@pytest.mark.asyncio(loop_scope="session")
async def test_the_real_engine_reproduces_a_synchronous_run_bit_for_bit(
    redis_url, redis_client, tied_engine, tmp_path
) -> None:
    model = tied_engine.folder / "model"
    first = await train_on(tied_engine.engine, redis_url, tmp_path / "first", model)
    redis_client.flushall()
    again = await train_on(tied_engine.engine, redis_url, tmp_path / "again", model, beside=True)
    updates, _, policies = first
    assert len(updates) == 3 and all(loss for loss, *_ in updates)
    assert len(set(policies.values())) == 4, "each update made another policy"
    assert again == first
