"""Adapters: their arithmetic, what is trained and published of a model that has some, and what a run leaves of them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.export import export_merged
from penstock.consumers.learning.model.packed_model import BaseOfAdapter, PackedModel
from penstock.schemas.config import AdvantageConfig, ConfigError, LoraConfig, ModelConfig, Plug, TrainerConfig
from training_groups import (
    configuration,
    gradients_of,
    lag_from,
    proximal_logprobs,
    random_groups,
    tiny_model,
    weights_of,
)

LORA = LoraConfig(rank=3, alpha=6.0)
TARGETS = {"q_proj": (32, 16), "k_proj": (16, 16), "v_proj": (16, 16), "o_proj": (16, 32)}
TARGETS |= {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
KL = Plug(path="penstock.consumers.learning.objectives.grpo:Grpo", kwargs={"kl_coefficient": 0.1})


def make(folder: Path, dtype: str = "float32", lora: LoraConfig | None = LORA, **changes: Any) -> Learner:
    return Learner(configuration(folder, model=ModelConfig(path=str(folder), dtype=dtype), lora=lora, **changes))


def batch(learner: Learner, seed: int = 0):
    return learner.pack(random_groups(4, seed), lag_from(7))


def trained(folder: Path, steps: int = 2, **settings: Any) -> Learner:
    learner = make(folder, **settings)
    for seed in range(steps):
        assert learner.step(batch(learner, seed)).skipped_reason is None
    return learner


def logprobs(learner: Learner, seed: int = 5) -> torch.Tensor:
    return torch.cat(proximal_logprobs(learner, batch(learner, seed)))


def merged(learner: Learner, folder: Path) -> Any:
    """The base with B A * alpha / rank added to its weights, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    published = learner.published_weights()
    with torch.no_grad():
        for name, first in published.items():
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                second = published[name.replace("lora_A", "lora_B")]
                model.get_submodule(module).weight += 2.0 * second @ first
    return model


def test_the_first_policy_is_the_base_and_what_is_published_is_named_as_by_peft(folder: Path) -> None:
    learner, plain = make(folder), make(folder, lora=None)
    assert learner.model.is_base and not plain.model.is_base
    assert torch.equal(logprobs(learner), logprobs(plain))
    learner.step(batch(learner))
    published, expected = learner.published_weights(), {}
    for layer in (0, 1):
        for target, (num_out, num_in) in TARGETS.items():
            where = "self_attn" if target[0] in "qkvo" else "mlp"
            name = f"base_model.model.model.layers.{layer}.{where}.{target}"
            expected |= {f"{name}.lora_A.weight": (3, num_in), f"{name}.lora_B.weight": (num_out, 3)}
    assert {name: tuple(tensor.shape) for name, tensor in published.items()} == expected
    parts = {part.name: part for part in learner.published_parts()()}
    assert parts.keys() == expected.keys()
    assert all(torch.equal(part.values, published[name].reshape(-1)) for name, part in parts.items())
    assert not learner.model.is_base


def test_logprobs_and_gradients_are_those_of_the_merged_weight_through_the_product(folder: Path, tmp_path) -> None:
    settings = TrainerConfig(device="cpu", learning_rate=1e-2, max_grad_norm=1e9)
    learner = trained(folder, trainer=settings)
    merged(learner, folder).save_pretrained(tmp_path)
    plain = make(tmp_path, lora=None, trainer=settings)
    assert (logprobs(learner) - logprobs(plain)).abs().max() <= 1e-5
    masters, gradients = weights_of(learner), [gradients_of(each) for each in (learner, plain)]
    for each in (learner, plain):
        each.step(batch(each, 5))
    (adapters,), (dense,) = gradients
    assert adapters and all(name.endswith(("lora_A", "lora_B")) for name in adapters)
    for name, gradient in adapters.items():
        module, _, factor = name.rpartition(".")
        whole = 2.0 * dense[f"{module}.weight"]
        expected = (
            masters[f"{module}.lora_B"].T @ whole if factor == "lora_A" else whole @ masters[f"{module}.lora_A"].T
        )
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_base_is_frozen_in_the_run_s_type_and_adapters_have_float32_masters(folder: Path, checkpointing) -> None:
    settings = TrainerConfig(device="cpu", learning_rate=1e-2, gradient_checkpointing=checkpointing)
    learner = make(folder, dtype="bfloat16", trainer=settings)
    frozen = {n: p for n, p in learner.model.module.named_parameters() if not n.endswith(("lora_A", "lora_B"))}
    before = {name: parameter.detach().clone() for name, parameter in frozen.items()}
    for seed in (0, 1):
        learner.step(batch(learner, seed))
    assert all(torch.equal(parameter, before[name]) for name, parameter in frozen.items())
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in frozen.values())
    assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
    assert {t.dtype for t in learner.published_weights().values()} == {torch.bfloat16}
    held = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in learner.model.parameters()} and len(held) == 28


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base_without_a_model_of_its_own(folder: Path, dtype: str) -> None:
    learner, other = trained(folder, dtype=dtype, objective=KL), make(folder, dtype=dtype, lora=None, objective=KL)
    assert isinstance(learner.scorer.reference, BaseOfAdapter) and isinstance(other.scorer.reference, PackedModel)
    _, ((mine,),) = learner.scorer.step_constants(batch(learner, 3))
    _, ((others,),) = other.scorer.step_constants(batch(other, 3))
    assert torch.equal(mine.reference_logprobs, others.reference_logprobs)
    assert not torch.equal(logprobs(learner, 3), mine.reference_logprobs), "the adapter is on again"
    in_reward = make(folder, dtype=dtype, advantage=AdvantageConfig(kl_coefficient=0.1))
    assert isinstance(in_reward.scorer.reference, BaseOfAdapter)


def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    whole = trained(folder, steps=4).published_weights()
    learner = trained(folder, steps=2)
    learner.begin_checkpoint(tmp_path).result()
    stored = load_file(tmp_path / "rank-0.safetensors")
    assert {name.rpartition(".")[2] for name in stored} == {"lora_A", "lora_B"}
    assert sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("masters/")) < 40_000
    state = json.loads(json.dumps(learner.state()))
    resumed = make(folder)
    resumed.load_checkpoint(tmp_path, state)
    for seed in (2, 3):
        resumed.step(batch(resumed, seed))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.published_weights().items())


def test_a_checkpoint_of_another_adapter_or_base_and_targets_that_the_model_lacks_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    tiny_model(tmp_path / "other", seed=1)
    saved = {"adapter": trained(folder, steps=1), "whole": make(folder, lora=None)}
    for name, learner in saved.items():
        learner.begin_checkpoint(tmp_path / name).result()
    of_rank, of_alpha, of_q = (
        msgspec.structs.replace(LORA, **change) for change in ({"rank": 4}, {"alpha": 3.0}, {"targets": ("q_proj",)})
    )
    for name, base, lora, message in (
        ("adapter", folder, of_rank, r"lora.rank = 4: the adapter in \S+ has 3; expected that"),
        ("adapter", folder, of_alpha, r"lora.alpha = 3.0: the adapter in \S+ has 6.0; expected that"),
        ("adapter", folder, of_q, r"lora.targets = \('q_proj',\): the adapter in \S+ has \('q_proj', 'k_proj'"),
        ("adapter", folder, None, r"lora: \S+ holds an adapter; expected \[lora\] as it was"),
        ("adapter", tmp_path / "other", LORA, r"'\S+/other': \S+ holds an adapter of another base: digest"),
        ("whole", folder, LORA, r"lora: \S+ holds all weights; expected no \[lora\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            make(base, lora=lora).load_checkpoint(tmp_path / name, saved[name].state())
    with pytest.raises(
        ConfigError,
        match=r"lora.targets = \['q_proj', 'query_key_value', 'lm_head'\]: the blocks of model.path = '\S+' have no "
        r"linear layer query_key_value, lm_head; expected some of down_proj, gate_proj, k_proj, o_proj, q_proj,",
    ):
        make(folder, lora=LoraConfig(targets=("q_proj", "query_key_value", "lm_head")))


def test_a_checkpoint_becomes_pefts_folder_or_a_whole_model_with_the_adapter_merged(folder: Path, tmp_path) -> None:
    import peft  # takes seconds, and this test alone needs it

    learner = trained(folder)
    learner.begin_checkpoint(tmp_path / "tensors").result()
    learner.export(tmp_path / "tensors", folder, tmp_path / "adapter", "float32")
    stored, published = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), learner.published_weights()
    assert stored.keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in stored.items())
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (3, 6.0, str(folder))
    base = AutoModelForCausalLM.from_pretrained(folder)
    ids, expected = torch.arange(20)[None], merged(learner, folder)
    with torch.no_grad():
        plain = base(ids).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        assert (loaded - expected(ids).logits).abs().max() <= 1e-5 < 1e-3 < (loaded - plain).abs().max()
    adapter = learner.export.args[0]
    for dtype in ("float32", "bfloat16"):
        export_merged(adapter, folder, tmp_path / "tensors", folder, tmp_path / dtype, dtype)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype="auto").state_dict()
        wanted = merged(learner, folder).to(getattr(torch, dtype)).state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(tensor, wanted[name], atol=1e-6) for name, tensor in found.items())
    tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"other: digest \w+; expected the base of the adapter, the model that was"):
        export_merged(adapter, tmp_path / "other", tmp_path / "tensors", folder, tmp_path / "out", "float32")
