"""Safetensors files checked by their headers."""

import json
import os

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from penstock.producers.engines.weight_files import BaseModel, HeaderError, check, read_header
from penstock.producers.interfaces import EngineError, WeightLoadError
from penstock.schemas.config import LoraConfig
from penstock.schemas.policy import TensorSpec, WeightManifest

WEIGHTS = {"model.embed_tokens.weight": torch.zeros(8, 4), "model.norm.weight": torch.ones(4)}


@pytest.fixture
def base(tmp_path) -> BaseModel:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "tie_word_embeddings": True}))
    save_file(WEIGHTS, folder / "model.safetensors")
    return BaseModel(str(folder))


def manifest_of(path: str, version: int = 3) -> WeightManifest:
    return WeightManifest(
        version=version,
        parent_version=version - 1,
        total_bytes=os.path.getsize(path),
        tensors=tuple(read_header(path).values()),
    )


def written(weights: dict[str, torch.Tensor], tmp_path) -> tuple[str, WeightManifest]:
    path = str(tmp_path / "v3.safetensors")
    save_file(weights, path)
    return path, manifest_of(path)


def test_a_header_lists_names_types_and_shapes(base):
    assert read_header(base.files[0]) == {
        "model.embed_tokens.weight": TensorSpec(name="model.embed_tokens.weight", dtype="float32", shape=(8, 4)),
        "model.norm.weight": TensorSpec(name="model.norm.weight", dtype="float32", shape=(4,)),
    }


def test_a_file_that_is_no_whole_safetensors_file_is_named(base, tmp_path):
    file = tmp_path / "broken.safetensors"
    for content in (b"", b"\x01", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", b"\x05" + b"\0" * 7 + b"nope!"):
        file.write_bytes(content)
        with pytest.raises(HeaderError, match=r"broken\.safetensors"):
            read_header(file)
    os.truncate(base.files[0], os.path.getsize(base.files[0]) - 4)
    with pytest.raises(HeaderError, match="its header describes"):
        read_header(base.files[0])


def test_weights_of_the_models_names_shapes_and_type_pass(base, tmp_path):
    path, manifest = written(WEIGHTS, tmp_path)
    check(path, manifest, base, "float32")
    path, manifest = written(WEIGHTS | {"lm_head.weight": torch.zeros(8, 4)}, tmp_path)
    check(path, manifest, base, "float32")
    beside = WEIGHTS | {"model.embed_tokens.weight": torch.zeros(8, 4).bfloat16()}  # a router's bias stays in float32
    check(*written(beside, tmp_path), base, "bfloat16")


@pytest.mark.parametrize(
    ("config", "other"),
    [
        ({"text_config": {}}, "model.visual.patch_embed.weight"),
        ({"num_nextn_predict_layers": 1}, "model.layers.61.embed_tokens.weight"),
        ({}, "mtp.norm.weight"),
    ],
)
def test_parts_that_no_text_model_has_need_no_weights_in_a_policy(base, tmp_path, config, other):
    layer = {"model.layers.0.a.weight": torch.ones(4), "model.layers.0.b.weight": torch.ones(4)}
    save_file(WEIGHTS | layer | {other: torch.ones(4)}, base.files[0])
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
    whole = BaseModel(base.folder)
    check(*written(WEIGHTS | layer, tmp_path), whole, "float32")
    del layer["model.layers.0.b.weight"]
    with pytest.raises(WeightLoadError, match=r"missing: \['model\.layers\.0\.b\.weight'\]"):
        check(*written(WEIGHTS | layer, tmp_path), whole, "float32")


@pytest.mark.parametrize(
    ("config", "is_tied"),
    [
        ({"model_type": "gemma2"}, True),
        ({"model_type": "qwen3"}, False),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, False),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "tie_word_embeddings": True}}, True),
    ],
)
def test_a_copy_of_the_embedding_as_head_may_be_left_out_if_the_architecture_ties_them(tmp_path, config, is_tied):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(WEIGHTS | {"lm_head.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    base, update = BaseModel(str(tmp_path)), written(WEIGHTS, tmp_path)
    if is_tied:
        check(*update, base, "float32")
    else:
        with pytest.raises(WeightLoadError, match=r"tensors missing: \['lm_head.weight'\]"):
            check(*update, base, "float32")


def test_weights_that_do_not_fit_or_are_not_announced_are_named(base, tmp_path):
    for weights, message in [
        ({"model.norm.weight": torch.ones(4)}, r"missing: \['model\.embed_tokens\.weight'\]"),
        (WEIGHTS | {"more": torch.ones(1)}, r"not in the model: \['more'\]"),
        (WEIGHTS | {"model.norm.weight": torch.ones(5)}, r"model\.norm\.weight: shape \(5,\), the model's is \(4,\)"),
        (WEIGHTS | {"model.norm.weight": torch.ones(4).half()}, "dtype float16, expected model.dtype = float32"),
    ]:
        with pytest.raises(WeightLoadError, match=message):
            check(*written(weights, tmp_path), base, "float32")
    path, manifest = written(WEIGHTS, tmp_path)
    with pytest.raises(WeightLoadError, match="announced None"):
        check(path, msgspec.structs.replace(manifest, tensors=manifest.tensors[:1]), base, "float32")


def test_a_folder_without_a_model_is_an_engine_error(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty"):
        with pytest.raises(EngineError, match=rf"model\.path = .*{name}"):
            BaseModel(str(tmp_path / name))


def test_without_weights_of_a_base_model_those_of_a_policy_are_taken_as_announced(base, tmp_path):
    os.unlink(base.files[0])
    alone = BaseModel(os.path.dirname(base.files[0]))
    assert (alone.files, alone.shapes) == ([], {})
    path, manifest = written(WEIGHTS, tmp_path)
    check(path, manifest, alone, "float32")
    with pytest.raises(WeightLoadError, match=r"dtype float32, expected model\.dtype = bfloat16"):
        check(path, manifest, alone, "bfloat16")


def test_a_sharded_checkpoint_is_read_by_its_index(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    save_file({"stray": torch.zeros(2)}, tmp_path / "stray.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert BaseModel(str(tmp_path)).shapes == {"a": (1,), "b": (2,)}


def test_an_adapter_is_checked_against_the_shapes_and_the_digest_of_its_base(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4)}, folder / "model.safetensors")
    base, lora, name = BaseModel(str(folder)), LoraConfig(rank=2), "base_model.model.model.layers.0.mlp.up_proj.lora_"
    adapter = {f"{name}A.weight": torch.zeros(2, 4), f"{name}B.weight": torch.zeros(6, 2)}
    path, manifest = written(adapter, tmp_path)
    check(path, msgspec.structs.replace(manifest, base_digest=base.digest), base, "float32", lora)
    other = msgspec.structs.replace(manifest, base_digest="0" * 32)
    with pytest.raises(WeightLoadError, match=r"policy 3: an adapter to a base of digest 000000000000, but model.path"):
        check(path, other, base, "float32", lora)
    for wrong, message in (
        ({f"{name}A.weight": torch.zeros(3, 4)}, r"lora_A.weight: shape \(3, 4\), the model's is \(2, 4\)"),
        ({f"{name}B.weight": torch.zeros(5, 2)}, r"lora_B.weight: shape \(5, 2\), the model's is \(6, 2\)"),
        ({"model.layers.0.mlp.up_proj.weight": torch.zeros(6, 4)}, r"not in the model: \['model.layers.0.mlp.up_proj"),
    ):
        path, manifest = written(wrong, tmp_path)
        with pytest.raises(WeightLoadError, match=message):
            check(path, manifest, base, "float32", lora)
