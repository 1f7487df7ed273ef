"""A checkpoint is whole or not used."""

import json
import os
import random

import msgspec
import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from penstock.consumers.checkpoints.checkpoints import (
    CheckpointError,
    Checkpoints,
    CheckpointWriteError,
    read_state,
    restore_rng,
    rng_state,
)
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.schemas.config import ConfigError, TrainerConfig
from scripted_learner import ScriptedLearner
from trainer_bench import assert_settled_once
from training_groups import configuration, lag_from, random_group, tiny_model


def state(version: int, learner=None) -> CheckpointState:
    return CheckpointState(
        policy_version=version,
        num_batches=version,
        forks={1: 3},
        announced={0: 9},
        counters={"x": 1.5},
        learner={"num_steps": version, "num_warm_steps": 0} if learner is None else learner.state(),
    )


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path, keep=2)


def write(checkpoints: Checkpoints, version: int, *, commit: bool = True) -> str:
    learner = ScriptedLearner(None)
    learner.num_steps, learner.trained = version, list(range(version))
    name = checkpoints.begin(learner, state(version, learner)).result()
    if commit:
        checkpoints.committed(name)
    return name


def load(tmp_path, pointer):
    learner = ScriptedLearner(None)
    loaded = Checkpoints(tmp_path, keep=2).load(pointer, learner)
    return loaded, learner


def test_the_last_two_committed_are_kept_and_one_that_redis_does_not_point_to_is_passed_over(checkpoints, tmp_path):
    names = [write(checkpoints, version) for version in (1, 2, 3)]
    write(checkpoints, 4, commit=False)
    assert load(tmp_path, names[2])[0] == state(3)
    assert load(tmp_path, None)[0].policy_version == 4, "without a pointer the newest valid one counts"
    newest = write(checkpoints, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[2], newest])
    loaded, learner = load(tmp_path, newest)
    assert loaded == state(5) and (learner.num_steps, learner.trained) == (5, [0, 1, 2, 3, 4])


def test_a_damaged_checkpoint_is_detected_and_its_predecessor_used(tmp_path, caplog):
    for damage in ("cut", "flip", "remove", "sums"):
        checkpoints = Checkpoints(tmp_path / damage, keep=2)
        checkpoints.claim_epoch(0)
        first, name = write(checkpoints, 1), write(checkpoints, 2)
        file = tmp_path / damage / name / ("checksums.json" if damage == "sums" else "tensors/trained.json")
        content = file.read_bytes()
        if damage == "remove":
            file.unlink()
        elif damage == "flip":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            file.write_bytes(content[: len(content) // 2])
        loaded, learner = load(tmp_path / damage, name)
        assert loaded.policy_version == learner.num_steps == 1, damage
        assert f"checkpoint {tmp_path / damage / name} cannot be used" in caplog.text
        (tmp_path / damage / first / "state.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"no checkpoint is whole: .*state.json: checksum differs"):
            load(tmp_path / damage, name)


def test_no_two_trainers_get_one_epoch(tmp_path):
    first, second = Checkpoints(tmp_path, keep=2), Checkpoints(tmp_path, keep=2)
    assert first.claim_epoch(0) == 0
    assert second.claim_epoch(0) == 1
    assert first.claim_epoch(7) == 7, "Redis may know of epochs that this disk does not"
    assert second.claim_epoch(0) == 8


@pytest.mark.redis
def test_a_run_keeps_its_id_and_the_folder_of_another_is_refused(bench, redis_client):
    bench.producer()
    first = bench.stopped_at(5)
    redis_client.flushall()
    second = bench.trainer(resume=True)
    assert second.leadership.scripts.run_id == first.leadership.scripts.run_id != ""
    assert second.run()
    assert_settled_once(bench, redis_client)
    redis_client.hset(bench.keys.commit, "run_id", "other")
    with pytest.raises(
        ConfigError, match=r"name = 'test': Redis holds another run of this name \(other\) than the folder"
    ):
        bench.trainer(resume=True)


@pytest.mark.redis
def test_redis_keeps_the_tasks_of_what_the_older_checkpoint_kept_has_not_released(bench, redis_client):
    bench.producer()
    bench.stopped_at(9)
    states = [read_state(folder) for folder in (bench.folder / "checkpoints").glob("*-*") if folder.is_dir()]
    before, _ = sorted(state.ledger.num_released for state in states)
    released = int(redis_client.hget(bench.keys.commit, "released"))
    assert {int(index) for index in redis_client.hkeys(bench.keys.tasks)} == set(range(before + 1, released + 1))


def test_a_checkpoint_s_model_folder_holds_the_configuration_and_the_tokenizer(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (base / name).write_text(name)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2, base)
    assert not (tmp_path / "checkpoints").exists(), "one that only stands by leaves no trace"
    checkpoints.claim_epoch(0)
    name = write(checkpoints, 1)
    files = {file.name for file in (tmp_path / "checkpoints" / name / "model").iterdir()}
    assert files == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_a_checkpoint_of_a_form_that_is_not_read_any_more_is_refused_as_one(checkpoints, tmp_path):
    name = write(checkpoints, 1)
    sums = json.loads((tmp_path / name / "checksums.json").read_text())
    (tmp_path / name / "checksums.json").write_text(json.dumps({"state.json": sums["state.json"]}))
    with pytest.raises(CheckpointError, match="it has no tensors/: another version of penstock wrote it"):
        load(tmp_path, name)


def test_the_run_s_folder_that_a_trainer_makes_is_its_owner_s_alone_and_one_that_is_there_keeps_its_rights(tmp_path):
    Checkpoints(tmp_path / "runs" / "made" / "checkpoints", keep=2).claim_epoch(0)
    (tmp_path / "runs" / "opened").mkdir()
    (tmp_path / "runs" / "opened").chmod(0o750)
    Checkpoints(tmp_path / "runs" / "opened" / "checkpoints", keep=2).claim_epoch(0)
    rights = {folder.name: oct(folder.stat().st_mode & 0o777) for folder in (tmp_path / "runs").iterdir()}
    assert rights == {"made": "0o700", "opened": "0o750"}


def test_the_model_of_the_last_checkpoint_is_handed_out_whole_with_usual_rights(tmp_path):
    tiny_model(tmp_path / "base")
    learner = Learner(configuration(tmp_path / "base"))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 1, tmp_path / "base")
    checkpoints.claim_epoch(0)
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "model" / "of_an_earlier_end.safetensors").touch()
    umask = os.umask(0o022)
    try:
        first = checkpoints.begin(learner, state(1, learner)).result()
        checkpoints.committed(first)
        handed_out = checkpoints.hand_out_model(learner.export)
    finally:
        os.umask(umask)
    assert handed_out == tmp_path / "run" / "model"
    rights = {file.name: oct(file.stat().st_mode & 0o777) for file in handed_out.iterdir()}
    assert rights == dict.fromkeys(("config.json", "generation_config.json", "model.safetensors"), "0o644")
    model = PackedModel(str(handed_out), "float32", torch.device("cpu"))
    assert all(torch.equal(tensor, learner.model.state()[name]) for name, tensor in model.state().items())


def test_a_trainer_that_sleeps_through_its_replacement_deletes_nothing_newer(tmp_path):
    sleeping, successor = Checkpoints(tmp_path, keep=2), Checkpoints(tmp_path, keep=2)
    write(sleeping, 1)
    last = write(sleeping, 2, commit=False)
    newer = write(successor, 9, commit=False)  # under way, and not yet committed
    sleeping.committed(last)
    assert (tmp_path / newer / "state.json").is_file()


def test_the_state_of_every_random_generator_is_kept(checkpoints, tmp_path):
    random.seed(7)
    np.random.seed(7)
    np.random.normal()  # leaves the second of a pair behind
    saved = msgspec.structs.replace(state(1), rng=rng_state())
    name = checkpoints.begin(ScriptedLearner(None), saved).result()
    drawn = [random.random(), np.random.normal(), np.random.rand()]
    random.seed(8)
    np.random.seed(8)
    loaded, _ = load(tmp_path, name)
    restore_rng(loaded.rng)
    assert [random.random(), np.random.normal(), np.random.rand()] == drawn


def test_a_real_learner_continues_from_its_checkpoint_with_equal_bits(checkpoints, tmp_path):
    # Warm-up and decay, moments of the optimizer, torch's generator: all of it decides what the next steps do.
    tiny_model(tmp_path / "tiny")
    trainer = TrainerConfig(device="cpu", learning_rate=1e-2, warmup_steps=4, decay="linear")
    config = configuration(tmp_path / "tiny", trainer=trainer, num_updates=8)
    batches = [pack([random_group(i, seed) for i in (1, 2, 3)], lag_from(7), config) for seed in range(6)]
    learner = Learner(config)
    for batch in batches[:3]:
        learner.step(batch)
    torch.rand(5)
    (tmp_path / "checkpoints").mkdir()
    folder = Checkpoints(tmp_path / "checkpoints", keep=2)
    saved = state(3, learner)
    name = folder.begin(learner, saved).result()
    drawn = torch.rand(3)
    resumed = Learner(config)
    torch.manual_seed(99)
    assert folder.load(name, resumed) == saved
    assert torch.equal(torch.rand(3), drawn)
    for batch in batches[3:]:
        expected, got = learner.step(batch), resumed.step(batch)
        assert got.metrics == expected.metrics
    weights = resumed.published_weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in learner.published_weights().items())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("os error 28")])
def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(checkpoints, tmp_path, error):
    before = write(checkpoints, 1)

    class Full(ScriptedLearner):
        def write(self, folder):
            super().write(folder)
            raise error

    with pytest.raises(CheckpointWriteError, match=r"checkpoint .* cannot be written: .*28"):
        checkpoints.begin(Full(None), state(2)).result()
    assert [path.name for path in tmp_path.iterdir()] == [before]
    assert load(tmp_path, before)[0].policy_version == 1
