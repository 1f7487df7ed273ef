"""The weights of a check: held while a trainer deletes them, and made for a probe."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.deploy.parity.inputs import WeightVersions, with_neighbours
from penstock.deploy.parity.probe import CHANGE, make_policies
from penstock.producers.engines.weight_files import BaseModel, check
from penstock.schemas.config import ModelConfig
from penstock.schemas.model_digest import model_digest
from training_groups import configuration, tiny_model


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    for version in (3, 4, 5):
        (folder / f"v{version}.safetensors").write_bytes(b"%d" % version)
    return folder


def test_a_version_is_readable_after_its_file_is_deleted(published, tmp_path):
    with WeightVersions(tmp_path / "base", published) as weights:
        weights.hold()
        for file in published.iterdir():
            file.unlink()
        assert weights.versions == [3, 4, 5]
        assert weights(4).read_bytes() == b"4"


def test_the_base_model_is_version_0_and_an_unknown_version_is_gone(published, tmp_path):
    with WeightVersions(tmp_path / "base", published) as weights:
        weights.hold()
        assert weights(0) == tmp_path / "base"
        assert weights(6) is None
        (published / "v0.safetensors").write_bytes(b"0")
        weights.hold()
        assert weights(0).read_bytes() == b"0", "what was published is what was served"


def open_files(folder: Path) -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


def test_what_is_not_needed_is_let_go_and_at_the_end_everything(published, tmp_path):
    with WeightVersions(tmp_path / "base", published) as weights:
        weights.hold()
        weights.keep_only({4})
        assert weights.versions == [4] and len(open_files(published)) == 1
    assert open_files(published) == []


def test_what_a_writer_has_not_finished_is_no_version(published, tmp_path):
    (published / "v9.partial-17").write_bytes(b"")
    (published / "vnext.safetensors").write_bytes(b"")
    with WeightVersions(tmp_path / "base", published) as weights:
        weights.hold()
        assert weights.versions == [3, 4, 5]


def test_copies_are_of_the_versions_asked_for_that_are_there(published, tmp_path):
    with WeightVersions(tmp_path / "base", published) as weights:
        weights.hold()
        weights.copy({2, 3, 5}, tmp_path / "copies")
    assert sorted(file.name for file in (tmp_path / "copies").iterdir()) == ["v3.safetensors", "v5.safetensors"]


def test_the_neighbours_of_a_version_are_those_that_may_have_been_served_in_its_place():
    assert with_neighbours({7}) == {5, 6, 7, 8}
    assert with_neighbours({0}) == {0, 1}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


def test_equal_run_files_make_equal_policies(tmp_path):
    tiny_model(tmp_path / "model")
    config = configuration(tmp_path / "model")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        make_policies(config, folder, 1)
    one, two = (load_file(folder / "v1.safetensors") for folder in (first, second))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_a_model_s_digest_knows_its_weights_its_configuration_and_its_tokenizer(tmp_path):
    def digest(seed: int = 0, tokenizer: str | None = None, **changes) -> str:
        folder = tmp_path / f"{seed} {tokenizer} {changes}"
        tiny_model(folder, seed=seed, **changes)
        if tokenizer is not None:
            (folder / "tokenizer.json").write_text(tokenizer)
        return model_digest(folder)

    assert digest() == digest()
    assert len({digest(), digest(1), digest(tokenizer="{}"), digest(rms_norm_eps=0.1)}) == 4
