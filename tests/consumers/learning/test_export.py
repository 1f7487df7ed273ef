"""A checkpoint's tensors become what transformers loads."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.consumers.checkpoints.model_folder import copy_model_files, export_checkpoint
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.export import export_model
from penstock.schemas.config import ConfigError
from training_groups import configuration, lag_from, random_group, tiny_model


def mixture_of_experts(folder: Path) -> None:
    """Its experts are one tensor in memory, and one each in a file."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


MODELS = {
    "tied": tiny_model,
    "untied": lambda folder: tiny_model(folder, tied=False),
    "experts": mixture_of_experts,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_what_was_trained_is_what_transformers_loads(tmp_path, model, dtype) -> None:
    base, folder = tmp_path / "base", tmp_path / "exported"
    MODELS[model](base)
    # transformers refuses to write a temperature without sampling, and to read the others.
    refused = {"temperature": 0.6, "num_return_sequences": 4, "max_new_tokens": -5, "cache_implementation": "own"}
    (base / "generation_config.json").write_text(json.dumps(refused | {"eos_token_id": 1}))
    learner = Learner(configuration(base))
    learner.step(pack([random_group(1, 0)], lag_from(7), learner.config))
    (tmp_path / "saved" / "model").mkdir(parents=True)
    learner.begin_checkpoint(tmp_path / "saved" / "tensors").result()
    copy_model_files(base, tmp_path / "saved" / "model")
    export_checkpoint(tmp_path / "saved", folder, dtype, export_model)
    assert (folder / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    (folder / "generation_config.json").unlink()
    loaded, of = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not of["missing_keys"] and not of["unexpected_keys"] and str(loaded.dtype) == f"torch.{dtype}"
    expected = learner.model.module.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in loaded.state_dict().items())
    assert {file.name for file in folder.glob("*.safetensors")} == {"model.safetensors"}


def test_tensors_of_another_model_than_the_configuration_s_are_refused(tmp_path) -> None:
    tiny_model(tmp_path / "base")
    Learner(configuration(tmp_path / "base")).begin_checkpoint(tmp_path / "tensors").result()
    for name, changes, message in (
        ("deeper", {"num_hidden_layers": 3}, r"lacks masters/model.layers.2\S+; .*and \d+ more$"),
        ("wider", {"intermediate_size": 32}, r"masters/model.layers.0\S+ is \[24, 16\], in the model \[32, 16\];"),
    ):
        tiny_model(tmp_path / name, **changes)
        with pytest.raises(ConfigError, match=rf"tensors: of another model: {message}"):
            export_model(tmp_path / "tensors", tmp_path / name, tmp_path / "out", "float32")
        assert not (tmp_path / "out").exists()
