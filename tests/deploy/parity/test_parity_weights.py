"""The weights of a check: written from a run's log before the trainer drops them, and made for a probe."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import fakeredis
import pytest
import torch
from safetensors.torch import load_file

from penstock.consumers.parity.logged_versions import LoggedVersions, WeightVersions
from penstock.consumers.parity.report import ParityError
from penstock.deploy.parity.inputs import with_neighbours
from penstock.deploy.parity.probe import CHANGE, make_policies, run_probe
from penstock.producers.engines.weight_files import BaseModel, check
from penstock.schemas.config import ConfigError, EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.keys import Keys
from penstock.schemas.model_digest import model_digest
from penstock.schemas.weights.log import read_log
from penstock.schemas.weights.reading import WeightReader
from training_groups import configuration, tiny_model
from weight_writer import WrittenLog


@pytest.fixture
def log() -> WrittenLog:
    """Versions 3 to 6, of which 3 is whole."""
    log = WrittenLog(fakeredis.FakeRedis(), Keys("run"))
    for version in range(3, 7):
        log.announce(version, policy(version))
    return log


def policy(version: int) -> dict[str, torch.Tensor]:
    weights = torch.zeros(256, dtype=torch.bfloat16)
    weights[version] = version
    return {"w": weights, "b": torch.ones(3)}


@pytest.fixture
def weights(log, tmp_path) -> LoggedVersions:
    (tmp_path / "files").mkdir()
    return LoggedVersions(tmp_path / "base", tmp_path / "files", reader(log))


def reader(log: WrittenLog) -> WeightReader:
    return WeightReader(lambda command: command(log.client), log.keys)


def held(path: Path | None) -> int | None:
    """The version whose weights are in a file."""
    if path is None:
        return None
    found = load_file(path)
    (version,) = (n for n in range(9) if all(torch.equal(found[name], w) for name, w in policy(n).items()))
    return version


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_version_of_a_run_is_written_when_it_is_asked_for_and_stays_while_it_is_held(weights, log, tmp_path):
    files = tmp_path / "files"
    assert names(files) == [] and held(weights(5)) == 5 and names(files) == ["v5.safetensors"]
    assert weights(0) == tmp_path / "base", "the log has no version 0"
    weights.hold({3, 4})
    weights.hold({4, 6, 77})
    assert names(files) == ["v4.safetensors", "v6.safetensors"]
    log.anchor(6)
    log.drop(3, 4, 5)
    assert held(weights(4)) == 4 and held(weights(6)) == 6, "the trainer has dropped them meanwhile"
    assert weights(5) is None and weights(9) is None
    weights.copy({2, 4, 6}, tmp_path / "copies")
    copied = WeightVersions(tmp_path / "base", tmp_path / "copies")
    assert held(copied(4)) == 4 and copied(5) is None and copied(0) == tmp_path / "base"


def test_a_version_dropped_between_log_and_chunks_is_gone_and_a_chunk_that_is_lost_is_named(weights, log, monkeypatch):
    log.anchor(6)
    logs = iter([read_log(log.client, log.keys)])  # then as they are
    monkeypatch.setattr(WeightReader, "log", lambda self: next(logs, None) or read_log(log.client, log.keys))
    log.drop(3, 4, 5)
    assert weights(5) is None
    log.store.delete(["6-anchor-0-0"])
    with pytest.raises(ParityError, match=r"Redis \{run\}:chunks has no chunk 6-anchor-0-0"):
        weights(6)


def test_want_of_room_and_a_torn_log_are_errors_of_the_check(weights, log, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=600))
        with pytest.raises(ParityError, match=r"no room for the weights of 2 versions: 1,048 bytes are needed, 600"):
            weights.hold({3, 4})

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ParityError, match=r"\d+ bytes are needed: '.*v4.*'; TMPDIR names a folder with room"):
            weights(4)
    assert names(tmp_path / "files") == []
    log.store.put("4-delta-0-0", b"torn")
    with pytest.raises(ParityError, match="weight log cannot be read: policy 4: chunk 4-delta-0-0 in redis: 4 bytes"):
        weights(4)
    log.client.xadd(log.keys.policy, {"manifest": b"{}"})
    assert held(weights(3)) == 3, "a broken entry costs that entry alone"
    assert (with_neighbours({7}), with_neighbours({0})) == ({5, 6, 7, 8}, {0, 1})


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_a_probe_s_policies_are_what_the_engine_takes_each_a_little_off_the_one_before(tmp_path, tied, dtype):
    tiny_model(tmp_path / "model", tied=tied)
    config = configuration(tmp_path / "model", model=ModelConfig(path=str(tmp_path / "model"), dtype=dtype))
    updates = make_policies(config, tmp_path, 3)
    assert [update.manifest.version for update in updates] == [1, 2, 3]
    before = load_file(tmp_path / "model" / "model.safetensors")
    for update in updates:
        check(update.path, update.manifest, BaseModel(config.model.path), dtype)
        after = load_file(update.path)
        for name, tensor in after.items():
            change = (tensor.float() - before[name].float()).norm() / before[name].float().norm()
            assert 0.3 * CHANGE[dtype] < change < 3 * CHANGE[dtype], name
        before = after
    (tmp_path / "again").mkdir()
    again = load_file(make_policies(config, tmp_path / "again", 1)[0].path)
    first = load_file(updates[0].path)
    assert all(torch.equal(tensor, first[name]) for name, tensor in again.items()), "equal run files, equal policies"


def test_a_model_s_digest_knows_its_weights_its_configuration_and_its_tokenizer(tmp_path):
    def digest(seed: int = 0, tokenizer: str | None = None, **changes) -> str:
        folder = tmp_path / f"{seed} {tokenizer} {changes}"
        tiny_model(folder, seed=seed, **changes)
        if tokenizer is not None:
            (folder / "tokenizer.json").write_text(tokenizer)
        return model_digest(folder)

    assert digest() == digest()
    assert len({digest(), digest(1), digest(tokenizer="{}"), digest(rms_norm_eps=0.1)}) == 4


def test_a_probe_poses_no_training_task_of_an_environment_that_is_only_evaluated(monkeypatch, tmp_path):
    arithmetic = "penstock.producers.environments.arithmetic:Arithmetic"
    environments = tuple(
        EnvironmentConfig(path=arithmetic, name=name, weight=weight, kwargs={"width": width})
        for name, weight, width in (("only_evaluated", 0.0, 2), ("trained", 1.0, 3))
    )
    posed = []

    def pose(environments, tokenizer, num_prompts):
        posed.extend(each.prompt(1).text for each in environments)
        raise ConfigError("no model")

    monkeypatch.setattr("penstock.deploy.parity.probe.load_tokenizer", lambda config: None)
    monkeypatch.setattr("penstock.deploy.parity.probe.pose", pose)
    config = RunConfig(name="r", model=ModelConfig(path="m"), environments=environments)
    with pytest.raises(ConfigError):
        run_probe(config, tmp_path, num_prompts=4, log=tmp_path / "log", say=print)
    assert [len(text) for text in posed] == [len("123+456=")]
