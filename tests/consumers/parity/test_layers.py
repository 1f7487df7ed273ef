"""Engine and trainer layer by layer: only the part that is wrong is blamed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from captured_states import capture_of
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.inference import captured_version, compare_layers
from penstock.consumers.parity.report import ParityError
from penstock.schemas import hidden_states as names
from training_groups import tiny_model

IDS = [1, 5, 2, 9, 9, 3, 20, 0, 7, 11, 4, 6]
PARTS = [
    "embedding",
    *(f"layers.{index}.{part}" for index in range(3) for part in ("attention", "mlp")),
    "norm",
    "head",
    "as served",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "model", num_hidden_layers=3)
    return tmp_path / "model"


def engine_of(folder: Path, dtype: torch.dtype = torch.float32, **configuration):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **configuration)


def trainer_of(folder: Path, dtype: str = "float32") -> PackedModel:
    return PackedModel(str(folder), dtype, torch.device("cpu"))


def off(gaps) -> list[str]:
    assert [gap.name for gap in gaps] == PARTS
    return [gap.name for gap in gaps if gap.is_off]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_part_is_blamed_where_both_compute_the_same(folder, tmp_path, dtype):
    capture = capture_of(engine_of(folder, getattr(torch, dtype)), IDS, tmp_path / "c", version=4)
    model = trainer_of(folder, dtype)
    assert off(compare_layers(model, capture)) == []
    assert captured_version(capture) == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules()), "hooks are gone again"


def test_a_scale_of_the_logits_is_the_head_s(folder, tmp_path, monkeypatch):
    engine = engine_of(folder)
    engine.lm_head.weight = torch.nn.Parameter(engine.lm_head.weight * 0.3)
    capture = capture_of(engine, IDS, tmp_path / "c")
    model = trainer_of(folder)
    assert off(compare_layers(model, capture)) == ["head"]
    monkeypatch.setattr(model, "_logit_scale", 0.3)
    assert off(compare_layers(model, capture)) == []


def test_a_change_of_one_part_s_weights_blames_that_part_alone(folder, tmp_path):
    changes = {
        "embedding": "model.embed_tokens.weight",
        "layers.1.attention": "model.layers.1.self_attn.o_proj.weight",
        "layers.2.attention": "model.layers.2.input_layernorm.weight",
        "layers.0.mlp": "model.layers.0.mlp.down_proj.weight",
        "layers.1.mlp": "model.layers.1.post_attention_layernorm.weight",
        "norm": "model.norm.weight",
    }
    for part, parameter in changes.items():
        engine = engine_of(folder)
        if part == "embedding":  # else the tied head would change with it
            engine.lm_head.weight = torch.nn.Parameter(engine.lm_head.weight.clone())
        with torch.no_grad():
            engine.get_parameter(parameter)[0] *= 1.01
        assert off(compare_layers(trainer_of(folder), capture_of(engine, IDS, tmp_path / "c"))) == [part]


def test_another_rope_in_one_layer_blames_its_attention_alone(folder, tmp_path):
    engine = engine_of(folder)
    rotary = engine_of(folder, rope_parameters={"rope_type": "default", "rope_theta": 4e4}).model.rotary_emb

    def turned(module, arguments, keywords):
        states = keywords["hidden_states"]
        return arguments, keywords | {"position_embeddings": rotary(states, torch.arange(states.shape[1])[None])}

    engine.model.layers[1].self_attn.register_forward_pre_hook(turned, with_kwargs=True)
    assert off(compare_layers(trainer_of(folder), capture_of(engine, IDS, tmp_path / "c"))) == ["layers.1.attention"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_of_a_bfloat16_head_blame_the_head_alone_whatever_the_body_computes_in(folder, tmp_path, dtype):
    engine = engine_of(folder, getattr(torch, dtype))
    exact = load_file(capture_of(engine, IDS, tmp_path / "exact"))
    logits = (exact[names.NORM].bfloat16() @ engine.lm_head.weight.bfloat16().t()).float()
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(IDS)[1:, None])[:, 0].detach()
    capture = capture_of(engine, IDS, tmp_path / "c", **{names.LOGPROBS: logprobs})
    assert off(compare_layers(trainer_of(folder, dtype), capture)) == ["head"]


def test_an_engine_that_serves_other_states_than_its_layers_show_is_told_apart(folder, tmp_path):
    engine = engine_of(folder)
    served = load_file(capture_of(engine, IDS, tmp_path / "exact"))[names.NORM][-1] * 1.001
    capture = capture_of(engine, IDS, tmp_path / "c", **{names.AS_SERVED: served})
    assert off(compare_layers(trainer_of(folder), capture)) == ["as served"]


def test_a_value_that_is_not_a_number_is_blamed(folder, tmp_path):
    engine = engine_of(folder)
    capture = capture_of(
        engine, IDS, tmp_path / "c", **{names.layer(1, names.MLP): torch.full((len(IDS), 16), torch.nan)}
    )
    assert off(compare_layers(trainer_of(folder), capture)) == ["layers.1.mlp"]


def test_what_is_no_capture_of_the_model_is_refused(folder, tmp_path):
    model, engine = trainer_of(folder), engine_of(folder)
    (tmp_path / "text").write_text(json.dumps({}))
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ParityError, match="no hidden states can be read"):
        compare_layers(model, tmp_path / "text")
    with pytest.raises(ParityError, match="missing"):
        captured_version(tmp_path / "missing")
    with pytest.raises(ParityError, match="format None, expected 'penstock"):
        compare_layers(model, tmp_path / "other")

    capture = capture_of(engine, IDS, tmp_path / "c")
    tensors = load_file(capture)
    metadata = {"format": names.FORMAT, "num_layers": "3", "policy_version": "0"}
    save_file({name: t for name, t in tensors.items() if name != names.NORM}, tmp_path / "part", metadata=metadata)
    with pytest.raises(ParityError, match=r"lacks \['norm'\]"):
        compare_layers(model, tmp_path / "part")
    with pytest.raises(ParityError, match="1 tokens, expected 2 or more"):
        compare_layers(model, capture_of(engine, IDS[:1], tmp_path / "short"))
    with pytest.raises(ParityError, match="token 99, the vocabulary ends at 22"):
        save_file(tensors | {names.TOKEN_IDS: torch.tensor([99, *IDS[1:]])}, tmp_path / "ids", metadata=metadata)
        compare_layers(model, tmp_path / "ids")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_hidden_layers": 2}, "of 2 layers, the trainer's model has 3"), ({"hidden_size": 32}, r"\(12, 32\)")],
)
def test_a_capture_of_another_shape_of_model_is_refused(folder, tmp_path, changes, message):
    other = tiny_model(tmp_path / "other", **{"num_hidden_layers": 3} | changes)
    with pytest.raises(ParityError, match=message):
        compare_layers(trainer_of(folder), capture_of(other, IDS, tmp_path / "c"))
