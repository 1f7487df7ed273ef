"""docs/models.md says which architectures are trained and why others are not: small random models of each."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from families import ROWS, Family, assert_agrees, small_model
from penstock.consumers.learning.model import model_check
from penstock.consumers.learning.model import packed_model as model
from penstock.consumers.learning.model.expert_ranks import check_experts
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.schemas.config import ConfigError, LoraConfig, ModelConfig, RunConfig, TrainerConfig
from rank_processes import on_ranks
from rank_work import step_once, train
from training_groups import configuration, random_group, tiny_model

REFUSALS = {"dropout": "between two passes over the same rows"}
"""What a message says, by what the page says."""
UNSHARED = ("bloom", "mpt")
"""Those whose blocks hand the residual to their layers: ranks cannot share a row's tokens."""


@pytest.mark.parametrize("family", ROWS, ids=[family.kind for family in ROWS])
def test_the_page_says_of_an_architecture_what_the_check_finds(monkeypatch, family: Family) -> None:
    module, gaps, compare = small_model(family.kind), list[float](), model_check._compare
    assert type(module).__name__ == family.architecture

    def noted(found: torch.Tensor, expected: torch.Tensor, *arguments: Any) -> None:
        gaps.append(float((found - expected).abs().mean()))
        compare(found, expected, *arguments)

    monkeypatch.setattr(model, "load_model", lambda *_: module)
    monkeypatch.setattr(model_check, "ALLOWED", 1e-5)
    monkeypatch.setattr(model_check, "_compare", noted)

    def verdict_of(**settings: Any) -> str:
        try:
            packed = PackedModel(family.kind, "float32", torch.device("cpu"), **settings)
        except ConfigError as error:
            return next(
                (f"refused: {said}" for said, message in REFUSALS.items() if re.search(message, str(error))), str(error)
            )
        return {"rectangles": "in rectangles"}.get(packed.arrangement, packed.arrangement)

    found = verdict_of()
    assert_agrees(family.trainer, gaps[-1])
    checkpointed = verdict_of(gradient_checkpointing=True)
    assert family.rows == (found if checkpointed == found else f"{found}; with gradient checkpointing {checkpointed}")
    if found == "in rectangles":
        shared = verdict_of(per_pass=2)
        assert (shared == found) != (family.kind in UNSHARED), shared


KEPT = {
    "glm4_moe": "e_score_correction_bias",
    "solar_open": "e_score_correction_bias",
    "minimax_m2": "e_score_correction_bias",
    "afmoe": "expert_bias",
    "ernie4_5_moe": r"e_score_correction_bias|gate\.weight",
}
"""The tensors that engines hold in float32: by transformers' word, as a buffer, or as a parameter that is untrained."""


def _saved(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Saves a small model with odd values; returns the tensors of its file."""
    module = small_model(kind, **({"n_routed_experts": 4} if kind == "solar_open" else {}))
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.state_dict().items():
        if re.search(KEPT[kind], name):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) / 8)
    module.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KEPT)
def test_what_engines_hold_in_float32_is_published_in_float32(tmp_path, kind) -> None:
    saved = _saved(kind, tmp_path)
    for lora in (False, True):
        packed = PackedModel(str(tmp_path), "bfloat16", torch.device("cpu"), frozen=lora)
        weights = packed.published_weights()
        parts = {part.name: part.dtype for part in packed.published_parts()()}
        kept = {name for name in saved if re.search(KEPT[kind], name)}
        assert kept and weights.keys() == saved.keys() == parts.keys()
        for name, tensor in weights.items():
            dtype = torch.float32 if name in kept else torch.bfloat16
            assert (tensor.dtype, parts[name]) == (dtype, dtype), name
            assert torch.equal(tensor, saved[name].to(dtype)), name


@pytest.mark.xdist_group("ranks")
def test_two_ranks_publish_the_same_tensors_in_float32(tmp_path) -> None:
    configs, saved = {}, {}
    for kind in KEPT:
        saved[kind] = _saved(kind, tmp_path / kind)
        settings = ModelConfig(path=str(tmp_path / kind), dtype="bfloat16")
        configs[kind] = configuration(tmp_path / kind, model=settings, trainer=TrainerConfig(weight_decay=0.1))
    batches = {kind: [[random_group(index, 1, siblings=2) for index in range(1, 4)]] for kind in KEPT}
    trained = on_ranks(2, train, configs, batches, folder=tmp_path / "ranks")[0]
    for kind, found in trained.items():
        for name, tensor in found.weights.items():
            is_kept = re.search(KEPT[kind], name)
            assert tensor.dtype == (torch.float32 if is_kept else torch.bfloat16), name
            if is_kept and not name.endswith("gate.weight"):
                assert torch.equal(tensor, saved[kind][name]), f"{name} has no gradient, and moved"


@pytest.mark.parametrize(
    ("kind", "beside", "bypassed"),
    [("jamba", "in_proj", "dt_proj"), ("mamba", "x_proj", "dt_proj"), ("longcat_flash", "o_proj", "classifier")],
)
def test_an_adapter_that_the_architecture_would_bypass_is_refused(tmp_path, kind, beside, bypassed) -> None:
    small_model(kind).save_pretrained(tmp_path)
    for targets in ((beside,), (beside, bypassed)):
        settings = {"lora": LoraConfig(rank=2, targets=targets)}
        if bypassed not in targets:
            PackedModel(str(tmp_path), "bfloat16", torch.device("cpu"), **settings)
            continue
        with pytest.raises(ConfigError, match=rf"reads the weight of \S+{bypassed} .* targets without '{bypassed}'"):
            PackedModel(str(tmp_path), "bfloat16", torch.device("cpu"), **settings)


def test_an_architecture_that_cannot_run_in_16_bits_is_refused(tmp_path) -> None:
    """transformers' MiniMax multiplies its states, which saved buffers hold in float32, by values in bfloat16."""
    small_model("minimax").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot be run in rectangles: expected m1 and m2 to have the same dtype"):
        PackedModel(str(tmp_path), "bfloat16", torch.device("cpu"))


def test_time_steps_have_the_limits_of_the_engine(tmp_path) -> None:
    """transformers' Nemotron-H limits them by a setting of its initial weights, 0.001."""
    small_model("nemotron_h").save_pretrained(tmp_path)
    mixer = PackedModel(str(tmp_path), "float32", torch.device("cpu")).body.layers[0].mixer
    assert mixer.time_step_limit == (0.0, float("inf"))


def test_ranks_are_checked_in_the_mode_in_which_they_train(tmp_path) -> None:
    small_model("opt").save_pretrained(tmp_path / "opt")
    trainer = TrainerConfig(device="cpu", gradient_checkpointing=True)
    config = configuration(tmp_path / "opt", trainer=trainer)
    with pytest.raises(Exception, match="something random"):
        on_ranks(2, step_once, {"opt": config}, [random_group(1, 1)], folder=tmp_path)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "problem"),
    [
        ("qwen3_moe", 2, None),
        ("qwen3_moe", 3, "has 4 experts, which 3 ranks do not divide; expected false, or a number of ranks that does"),
        ("qwen3", 1, "Qwen3ForCausalLM has no layers of experts that transformers computes by grouped products"),
        ("llama4_text", 2, None),
    ],
)
def test_ranks_by_expert_need_experts_that_they_divide(kind: str, num_ranks: int, problem: str | None) -> None:
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_experts(small_model(kind), num_ranks, "model.path = 'mixture'")


ODD = {"hidden_size": 18, "intermediate_size": 25, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
QUICK = (
    "qwen3", "qwen2", "llama", "gemma3_text", "phi3", "cohere2", "gpt2", "mixtral", "qwen3_moe", "odd",
    "phi", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_text", "nemotron_h", "llama4_text", "lfm2",
)  # fmt: skip
REST = [family.kind for family in ROWS if family.ranks == "yes" and family.kind not in QUICK]
SHARED = {
    f"{kind} shared": kind for kind in ("gemma3_text", "qwen3_moe", "qwen3_next", "nemotron_h", "llama4_text", "lfm2")
}
"""Ranks share the tokens of rows, and experts if there are any."""
MANY_EXPERTS = {"qwen3_moe": {"num_experts": 64, "num_local_experts": 64}}
"""More than the tokens of a batch can meet."""


@pytest.fixture(scope="module")
def on_one_and_two(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """By architecture, on one process and on two ranks."""
    folder = tmp_path_factory.mktemp("architectures")
    configs: dict[str, RunConfig] = {}
    for kind in (*QUICK, *REST) if request.config.getoption("exhaustive") else QUICK:
        if kind == "odd":
            tiny_model(folder / kind, **ODD)
        else:
            small_model(kind, **MANY_EXPERTS.get(kind, {})).save_pretrained(folder / kind)
        trainer = TrainerConfig(device="cpu", max_grad_norm=1e9, tokens_per_microbatch=40)
        configs[kind] = configuration(folder / kind, trainer=trainer)
    groups = [random_group(index, 1, siblings=2) for index in range(1, 4)]
    one = on_ranks(1, step_once, configs, groups, folder=folder / "1")[0]
    for name, kind in SHARED.items():
        by_expert = {"expert_parallel": kind in ("qwen3_moe", "llama4_text")}
        configs[name] = replace(configs[kind], trainer=replace(configs[kind].trainer, context_parallel=2, **by_expert))
        one[name] = one[kind]
    return one, on_ranks(2, step_once, configs, groups, folder=folder / "2")[0]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    "kind", (*QUICK, *SHARED, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in REST))
)
def test_two_ranks_find_logprobs_and_gradients_of_one_process(on_one_and_two, kind: str) -> None:
    (expected_gradients, expected), (gradients, found) = (of_size[kind] for of_size in on_one_and_two)
    assert gradients.keys() == expected_gradients.keys()
    whole = torch.stack([gradient.norm() for gradient in expected_gradients.values()]).norm()
    for name, gradient in gradients.items():
        expected_gradient, rounding = expected_gradients[name], 1e-7 * whole  # a key's bias has nothing else
        allowed = (1e-5 if kind not in REST else 5e-5) * expected_gradient.norm() + rounding
        assert (gradient - expected_gradient).norm() <= allowed, name
    assert all(gradient.any() for gradient in gradients.values())
    if kind in MANY_EXPERTS:
        by_expert = next(gradient for name, gradient in gradients.items() if name.endswith("experts.down_proj"))
        assert not by_expert.flatten(1).any(1).all(), "every expert was met"
    for place, findings in expected.items():
        logprobs, others = (np.frombuffer(each.proximal_logprobs, np.float32) for each in (findings, found[place]))
        assert len(logprobs)
        # One process alone is up to 1.1e-5 from float64, in the delta nets.
        np.testing.assert_allclose(others, logprobs, rtol=0, atol=3e-5)
