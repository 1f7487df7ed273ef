"""Engine and trainer layer by layer: only the part that is wrong is blamed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from captured_states import capture_of
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.parity.inference import captured_version, compare_layers
from penstock.consumers.parity.report import ParityError
from penstock.schemas import hidden_states as names
from training_groups import VOCABULARY, tiny_model

IDS = [1, 5, 2, 9, 9, 3, 20, 0, 7, 11, 4, 6]
LAYERS = [f"layers.{index}.{part}" for index in range(3) for part in ("attention", "mlp")]
PARTS = ["embedding", *LAYERS, "norm", "head", "as served"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers") / "model"
    tiny_model(folder, num_hidden_layers=3)
    return folder


def engine_of(folder: Path, dtype: torch.dtype = torch.float32, **configuration):
    engine = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **configuration)
    engine.lm_head.weight = torch.nn.Parameter(engine.lm_head.weight.clone())  # else it would change with the embedding
    return engine


def trainer_of(folder: Path, dtype: str = "float32") -> PackedModel:
    return PackedModel(str(folder), dtype, torch.device("cpu"))


def off(gaps) -> list[str]:
    assert [gap.name for gap in gaps] == PARTS
    return [gap.name for gap in gaps if gap.is_off]


@pytest.mark.parametrize(("dtype", "head"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16")])
def test_only_a_16_bit_head_is_blamed_and_nothing_where_both_compute_the_same(deep, tmp_path, dtype, head):
    engine = engine_of(deep, getattr(torch, dtype))
    capture = capture_of(engine, IDS, tmp_path / "exact", version=4)
    model = trainer_of(deep, dtype)
    assert off(compare_layers(model, capture)) == []
    assert captured_version(capture) == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules()), "hooks are gone again"

    half = getattr(torch, head)
    logits = (load_file(capture)[names.NORM].to(half) @ engine.lm_head.weight.to(half).t()).float()
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, torch.tensor(IDS)[1:, None])[:, 0].detach()
    assert off(compare_layers(model, capture_of(engine, IDS, tmp_path / "c", **{names.LOGPROBS: logprobs}))) == ["head"]


def test_other_experts_of_a_few_tokens_in_16_bits_are_no_other_layer(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for dtype, few in (("bfloat16", []), ("float32", ["layers.1.mlp"])):
        engine, model = engine_of(tmp_path / "model", getattr(torch, dtype)), trainer_of(tmp_path / "model", dtype)
        name = names.layer(1, names.MLP)
        outputs = load_file(capture_of(engine, IDS, tmp_path / "exact"))[name]
        for num_tokens, expected in ((0, []), (1, few), (4, ["layers.1.mlp"])):
            other = torch.cat([2 * outputs[:num_tokens], outputs[num_tokens:]])
            capture = capture_of(engine, IDS, tmp_path / "other", **{name: other})
            assert off(compare_layers(model, capture)) == expected, (dtype, num_tokens)


def scaled(parameter: str, by: float = 1.01) -> Callable:
    def change(engine) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            engine.get_parameter(parameter)[0] *= by
        return {}

    return change


def another_rope(engine) -> dict[str, torch.Tensor]:
    """Changes that of layer 1 alone."""
    rotary = type(engine.model.rotary_emb)(engine.config)
    rotary.inv_freq = rotary.inv_freq * 0.7

    def turned(module, arguments, keywords):
        states = keywords["hidden_states"]
        return arguments, keywords | {"position_embeddings": rotary(states, torch.arange(states.shape[1])[None])}

    engine.model.layers[1].self_attn.register_forward_pre_hook(turned, with_kwargs=True)
    return {}


def test_the_part_that_is_wrong_is_blamed_alone(deep, tmp_path):
    for number, (part, change) in enumerate(
        (
            ("embedding", scaled("model.embed_tokens.weight")),
            ("layers.1.attention", scaled("model.layers.1.self_attn.o_proj.weight")),
            ("layers.2.attention", scaled("model.layers.2.input_layernorm.weight")),
            ("layers.0.mlp", scaled("model.layers.0.mlp.down_proj.weight")),
            ("layers.1.mlp", scaled("model.layers.1.post_attention_layernorm.weight")),
            ("norm", scaled("model.norm.weight")),
            ("head", scaled("lm_head.weight", 0.3)),
            ("layers.1.attention", another_rope),
            ("layers.1.mlp", lambda _: {names.layer(1, names.MLP): torch.full((len(IDS), 16), torch.nan)}),
            ("as served", lambda _: {names.AS_SERVED: torch.ones(16)}),
        )
    ):
        engine = engine_of(deep)
        capture = capture_of(engine, IDS, tmp_path / str(number), **change(engine))
        assert off(compare_layers(trainer_of(deep), capture)) == [part], number


def test_what_is_no_capture_of_the_model_is_refused(deep, tmp_path):
    model, engine = trainer_of(deep), engine_of(deep)
    metadata = {"format": names.FORMAT, "num_layers": "3", "policy_version": "0"}
    tensors = load_file(capture_of(engine, IDS, tmp_path / "c"))
    (tmp_path / "text").write_text("{}")
    save_file(tensors, tmp_path / "other")
    save_file({name: t for name, t in tensors.items() if name != names.NORM}, tmp_path / "part", metadata=metadata)
    save_file(tensors | {names.TOKEN_IDS: torch.tensor([99, *IDS[1:]])}, tmp_path / "ids", metadata=metadata)
    capture_of(engine, IDS[:1], tmp_path / "short")
    for name, changes in (("shallow", {"num_hidden_layers": 2}), ("wide", {"hidden_size": 32})):
        capture_of(tiny_model(tmp_path / f"{name}-model", **{"num_hidden_layers": 3} | changes), IDS, tmp_path / name)
    for name, message in {
        "text": "no hidden states can be read",
        "missing": "no hidden states can be read",
        "other": "format None, expected 'penstock",
        "part": r"lacks \['norm'\]",
        "short": "1 tokens, expected 2 or more",
        "ids": "token 99, the vocabulary ends at 22",
        "shallow": "of 2 layers, the trainer's model has 3",
        "wide": r"\(12, 32\)",
    }.items():
        with pytest.raises(ParityError, match=message):
            compare_layers(model, tmp_path / name)
