"""The model around a step: what it publishes, what it refuses to load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.packing import pack
from penstock.schemas.config import ConfigError, ModelConfig, Plug, TrainerConfig
from training_groups import configuration, lag_from, random_group, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def _batch(config):
    return pack([random_group(i, 0) for i in range(1, 6)], lag_from(7), config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_are_what_save_pretrained_would_write(tmp_path, tied, dtype) -> None:
    tiny_model(tmp_path / "tiny", tied=tied)
    learner = Learner(configuration(tmp_path / "tiny", model=ModelConfig(path=str(tmp_path / "tiny"), dtype=dtype)))
    published = learner.published_weights()
    written = load_file(tmp_path / "tiny" / "model.safetensors")
    assert published.keys() == written.keys()
    assert ("lm_head.weight" in published) != tied
    for name, tensor in published.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, written[name].to(tensor.dtype))
    assert len({tensor.data_ptr() for tensor in published.values()}) == len(published)


def test_published_weights_do_not_move_with_the_next_step(folder) -> None:
    config = configuration(folder)
    learner = Learner(config)
    published = learner.published_weights()
    kept = {name: tensor.clone() for name, tensor in published.items()}
    learner.step(_batch(config))
    assert all(torch.equal(published[name], kept[name]) for name in kept)
    assert any(not torch.equal(learner.published_weights()[name], kept[name]) for name in kept)


def test_a_model_folder_that_is_not_there_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"model.path = '.*nowhere': expected a folder"):
        Learner(configuration(tmp_path / "nowhere"))


def test_a_model_with_weights_missing_is_refused(folder) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weights \['model.norm.weight'\]"):
        Learner(configuration(folder))


def test_a_checkpoint_of_another_shape_is_refused(folder, tmp_path) -> None:
    tiny_model(tmp_path / "other", hidden_size=8)
    with pytest.raises(ConfigError, match="does not fit the model"):
        Learner(configuration(folder)).load_model(tmp_path / "other")


def test_cuda_without_a_device_is_refused(folder, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"trainer\.device = 'cuda'"):
        Learner(configuration(folder, trainer=TrainerConfig(device="cuda")))


def test_an_objective_of_the_wrong_shape_is_refused_with_the_expected_signature(folder) -> None:
    with pytest.raises(ConfigError, match=r"expected Objective.__call__\(self, inputs"):
        Learner(configuration(folder, objective=Plug(path="penstock.schemas.keys:Kind")))
    with pytest.raises(ConfigError, match="clip_low is 7"):
        Learner(
            configuration(
                folder, objective=Plug(path="penstock.consumers.learning.objectives.grpo:Grpo", kwargs={"clip_low": 7})
            )
        )


def test_a_model_that_goes_around_the_packed_attention_is_refused(folder) -> None:
    config = configuration(folder)
    learner = Learner(config)
    learner.model.module.config._attn_implementation = "sdpa"
    with pytest.raises(ConfigError, match="2 layers and called the packed attention 0 times"):
        learner.step(_batch(config))
