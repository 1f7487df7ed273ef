"""The policy of the best evaluation: which one is kept, its bits, and what a kill, a rollback or a lost log leave."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import penstock.consumers.__main__ as entry
from penstock.consumers.stream.evaluation import EvaluationResult
from penstock.consumers.trainer import Trainer
from penstock.consumers.weights.best import BestPolicy
from penstock.schemas.best import BestModel, read_best
from penstock.schemas.config import CheckpointConfig, ConfigError, EnvironmentConfig, LoraConfig, ModelConfig, RunConfig
from penstock.schemas.policy import WeightManifest
from penstock.schemas.weights.reading import WeightReader
from publishing_trainer import PublishingTrainer, RandomWalkMasters
from scripted_learner import KilledError, ScriptedLearner
from trainer_bench import TrainerBench, at_step
from waiting import wait_for

pytestmark = pytest.mark.redis


def result(version: int, reward: float, **figures: float) -> EvaluationResult:
    own = {"reward": reward, **figures}
    environments = {"sums": {"reward": 1 - reward}}
    return EvaluationResult(version, version, own, num_prompts=1, num_failed=0, environments=environments)


class Kept:
    """A weight log that keeps two versions, and what is kept of it as the best policy."""

    def __init__(self, url: str, folder: Path, model: Path, best: str | None = "reward", **changes: Any) -> None:
        self.config = RunConfig(
            name="test",
            model=ModelConfig(path=str(model), dtype="bfloat16"),
            environment=EnvironmentConfig(path="a:B"),
            checkpoint=CheckpointConfig(best=best),
            **changes,
        )
        self.folder = folder / "best"
        self.log = PublishingTrainer(url, folder, RandomWalkMasters(0), keep=2, pinned=lambda: self.best.pinned)
        self.best = self.opened()

    def opened(self, epoch: int = 0) -> BestPolicy:
        return BestPolicy(self.config, self.folder, WeightReader(self.log.connection.call, self.log.keys), epoch)

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.log.publish()
            self.log.masters.walk(0.05)
            self.log.settle()

    def consider(self, *results: EvaluationResult) -> None:
        for each in results:
            self.best.consider(each)
        self.best.wait()

    @property
    def version(self) -> int | None:
        found = read_best(self.folder)
        return None if found is None else found.policy_version


@pytest.fixture
def start(redis_url: str, tmp_path: Path, model_folder: Path) -> Iterator[Callable[..., Kept]]:
    started: list[Kept] = []

    def begin(**settings: Any) -> Kept:
        started.append(Kept(redis_url, tmp_path, model_folder, **settings))
        return started[-1]

    yield begin
    for each in started:
        each.log.close()


def test_the_evaluated_version_is_kept_bit_for_bit_however_late_its_result_is(start):
    kept = start()
    kept.publish(4)
    kept.best.expect(3)
    kept.publish(12)
    assert min(kept.log.versions()) <= 3, "it is kept past the last two"
    kept.consider(result(3, 0.5))
    found = load_file(kept.folder / "model.safetensors")
    assert found.keys() == kept.log.expected[3].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.log.expected[3].items())
    assert json.loads((kept.folder / "config.json").read_text()) == {"dtype": "bfloat16"}
    assert json.loads((kept.folder / "best.json").read_text())["value"] == 0.5
    kept.publish(20)
    assert min(kept.log.versions()) > 3, "and no longer than it is needed"


def test_of_the_versions_evaluated_the_best_stays_also_for_the_trainer_after_this_one(start):
    kept = start()
    kept.publish(6)
    for version in (4, 5):
        kept.best.expect(version)
    assert kept.best.pinned == {4, 5}
    kept.consider(result(4, 0.5), result(5, 0.5))
    assert kept.version == 4, "the first of equal ones"
    assert not kept.best.pinned
    kept.folder.rename(kept.folder.with_name("old-best"))  # as a kill between two renames leaves it
    kept.best = kept.opened(epoch=1)
    kept.consider(result(5, 0.4))
    assert kept.version == 4
    kept.consider(result(5, 0.6))
    assert kept.version == 5
    assert sorted(path.name for path in kept.folder.parent.iterdir() if "best" in path.name) == ["best"]


def test_without_the_setting_nothing_is_kept_and_what_no_trainer_wrote_is_refused(start):
    kept = start(best=None)
    kept.publish(3)
    kept.best.expect(1)
    kept.consider(result(1, 0.9))
    assert not kept.best.pinned and not kept.folder.exists()
    kept.config = msgspec.structs.replace(kept.config, checkpoint=CheckpointConfig(best="reward"))
    kept.folder.mkdir()
    (kept.folder / "best.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"best.json: .*expected what the trainer wrote"):
        kept.opened()


def test_any_figure_may_choose_as_it_is_named_in_the_lines(start):
    kept = start()
    kept.publish(4)
    parts = [{"pass@8": 0.1, "reward/exact": 0.9}, {"pass@8": 0.7, "reward/exact": 0.8}, {"pass@8": 0.3}]
    chosen = (("pass@8", 2), ("environments/sums/reward", 3), ("reward/exact", 1))
    for epoch, (figure, version) in enumerate(chosen, start=1):
        kept.config = msgspec.structs.replace(kept.config, checkpoint=CheckpointConfig(best=figure))
        kept.best = kept.opened(epoch)
        kept.consider(*(result(n, 1 - n / 10, **figures) for n, figures in enumerate(parts, start=1)))
        assert kept.version == version, figure


def test_a_version_that_the_log_has_lost_is_told_once_and_the_next_better_one_is_kept(start, caplog):
    kept = start()
    kept.publish(40)
    with caplog.at_level(logging.ERROR):
        kept.consider(result(1, 0.9))
    assert "policy 1 is the best with reward 0.9000, and cannot be kept: policy 1: its weights are kept" in caplog.text
    assert not kept.folder.exists() and not list(kept.folder.parent.glob("partial-*"))
    pending = BestModel(figure="reward", value=0.9, policy_version=77, update=7, dtype="bfloat16")
    file = kept.folder.with_name("pending-best-77.json")
    file.write_bytes(msgspec.json.encode(pending))
    kept.best = kept.opened(epoch=1)
    kept.best.wait()
    assert "policy 77 is the best with reward 0.9000, and cannot be kept" in caplog.text and not file.exists()
    kept.consider(result(kept.log.version, 0.2))
    assert kept.version == kept.log.version


def test_of_an_adapter_a_folder_of_pefts_is_kept(start, model_folder):
    kept = start(lora=LoraConfig(rank=4, targets=("q_proj",)))
    kept.publish(2)
    kept.consider(result(1, 0.5))
    described = json.loads((kept.folder / "adapter_config.json").read_text())
    assert (described["r"], described["base_model_name_or_path"]) == (4, str(model_folder))
    assert load_file(kept.folder / "adapter_model.safetensors").keys() == kept.log.expected[1].keys()


@pytest.fixture
def scored_bench(redis_url, tmp_path, model_folder, monkeypatch):
    """A run that keeps its best policy, which is 5."""
    monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
    bench = TrainerBench(redis_url, tmp_path)
    bench.overrides = ["checkpoint.best=reward", f"model.path={model_folder}", "weights.keep_versions=2"]
    bench.producer().held_out = lambda version: {0: 0.2, 5: 0.9}.get(version, 0.4)
    yield bench
    bench.close()


def ends_while_it_writes(
    trainer: Trainer, runs: Path, version: int, end: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> threading.Event:
    """Has the trainer meet `end` in a step after `version` was found to be the best; its models are not written until
    the event that is returned."""
    may_write, write = threading.Event(), WeightReader.write
    pending = trainer.config.folder(runs) / f"pending-best-{version}.json"

    def write_late(reader: WeightReader, chain: list[WeightManifest], path: Path) -> WeightManifest:
        may_write.wait(30)
        return write(reader, chain, path)

    def is_the_best() -> bool:
        for each in trainer.evaluator.collect():
            trainer.best.consider(each)
        return pending.exists()

    def once_it_is_the_best() -> None:
        wait_for(is_the_best)
        end()

    monkeypatch.setattr(WeightReader, "write", write_late)
    at_step(trainer, version + 2, once_it_is_the_best)
    return may_write


def killed() -> None:
    raise KilledError


def test_the_best_that_a_killed_trainer_was_writing_is_written_by_the_next_one(scored_bench, monkeypatch):
    before = {*threading.enumerate()}
    best, first = scored_bench.folder / "best", scored_bench.trainer()
    may_write = ends_while_it_writes(first, scored_bench.runs, 5, killed, monkeypatch)
    with pytest.raises(KilledError):
        first.run()
    assert not may_write.is_set() and not best.exists(), "nobody waits for it with a lease that others wait for"
    may_write.set()
    wait_for(lambda: not any(thread.name.startswith("best") for thread in {*threading.enumerate()} - before))
    assert not best.exists(), "the next trainer has the folder"
    assert scored_bench.trainer(resume=True).run()
    kept = read_best(best)
    assert (kept.policy_version, kept.update, kept.value) == (5, 5, 0.9)
    assert load_file(best / "model.safetensors")["steps"].tolist() == [5.0], "the policy that was evaluated"
    assert sorted(path.name for path in best.parent.iterdir() if "best" in path.name) == ["best"]


def test_a_trainer_that_is_stopped_hands_over_once_its_best_is_written(scored_bench, monkeypatch):
    trainer = scored_bench.trainer()
    may_write = ends_while_it_writes(trainer, scored_bench.runs, 5, trainer.stop, monkeypatch)
    wait, end, found = trainer.best.wait, trainer.leadership.end, []

    def wait_for_it() -> None:
        may_write.set()
        wait()

    def hand_over(**how: bool) -> None:
        found.append(read_best(scored_bench.folder / "best"))
        end(**how)

    monkeypatch.setattr(trainer.best, "wait", wait_for_it)
    monkeypatch.setattr(trainer.leadership, "end", hand_over)
    assert not trainer.run()
    may_write.set()
    assert found[0] is not None and found[0].policy_version == 5


def test_a_wait_after_the_end_is_for_the_model_under_way_and_not_for_those_behind_it(start, monkeypatch):
    kept = start()
    kept.publish(3)
    may_write, read = threading.Event(), WeightReader.log
    monkeypatch.setattr(WeightReader, "log", lambda reader: may_write.wait(30) and read(reader))
    for each in (result(1, 0.5), result(2, 0.6), result(0, 0.7)):
        kept.best.consider(each)
    kept.best.abandon()
    assert len(kept.best.pinned) == 1
    may_write.set()
    kept.best.wait()
    assert not kept.best.pinned and not kept.folder.exists()
