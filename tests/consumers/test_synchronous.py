"""A synchronous run gives the same bits again, however many producers it has and whichever answers first."""

from pathlib import Path
from typing import Any

import pytest

from producer_thread import Characters, ProducerThread
from scripted_engine import ScriptedEngine
from trainer_bench import TrainerBench
from training_groups import tiny_model

pytestmark = pytest.mark.redis


class SlowAtOddTasks(ScriptedEngine):
    """Answers the tasks of odd numbers late; its event loop is its thread's."""

    async def _sample(self, prompt_ids: list[int], *rest: Any) -> Any:
        self._token_s = 0.01 * (Characters().encode("1", False)[0] % 2 == prompt_ids[-1] % 2)
        return await super()._sample(prompt_ids, *rest)


def train(url: str, folder: Path, model: Path, engines: list[ScriptedEngine], *overrides: str) -> list[dict]:
    folder.mkdir()
    bench = TrainerBench(url, folder)
    bench.overrides = [
        *("mode=synchronous", f"model.path={model}", "num_updates=3", "group_size=4", "trainer.num_minibatches=2"),
        *("trainer.device=cpu", "trainer.learning_rate=0.01", "evaluation.num_prompts=0", *overrides),
    ]
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
        runs.append([(line["loss"], line["grad_norm"], line["entropy"], line["reward"]) for line in lines])
    assert len(runs[0]) == 3 and all(loss for loss, *_ in runs[0])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
