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
from training_groups import configuration, lag_from, proximal_logprobs, random_group, tiny_model

LORA = LoraConfig(rank=3, alpha=6.0)
TARGETS = {"q_proj": (32, 16), "k_proj": (16, 16), "v_proj": (16, 16), "o_proj": (16, 32)}
TARGETS |= {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}
KL = Plug(path="penstock.consumers.learning.objectives.grpo:Grpo", kwargs={"kl_coefficient": 0.1})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "base")
    return tmp_path / "base"


def make(folder: Path, dtype: str = "float32", lora: LoraConfig | None = LORA, **changes: Any) -> Learner:
    return Learner(configuration(folder, model=ModelConfig(path=str(folder), dtype=dtype), lora=lora, **changes))


def batch(learner: Learner, seed: int = 0):
    return learner.pack([random_group(index, seed) for index in range(1, 5)], lag_from(7))


def trained(folder: Path, steps: int = 2, **settings: Any) -> Learner:
    learner = make(folder, **settings)
    for seed in range(steps):
        assert learner.step(batch(learner, seed)).skipped_reason is None
    return learner


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


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def test_the_first_policy_is_the_base(base: Path) -> None:
    learner, plain = make(base), make(base, lora=None)
    assert learner.model.is_base and not plain.model.is_base
    for mine, others in zip(
        proximal_logprobs(learner, batch(learner)), proximal_logprobs(plain, batch(plain)), strict=True
    ):
        assert torch.equal(mine, others)


def test_what_is_published_are_the_adapter_s_tensors_by_peft_s_names(base: Path) -> None:
    learner = trained(base)
    published = learner.published_weights()
    expected: dict[str, tuple[int, int]] = {}
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


def test_a_trained_adapter_computes_what_the_merged_model_computes(base: Path) -> None:
    learner = trained(base)
    model = merged(learner, base)
    model.save_pretrained(base.parent / "merged")
    expected = make(base.parent / "merged", lora=None)
    for mine, others in zip(
        proximal_logprobs(learner, batch(learner, 5)), proximal_logprobs(expected, batch(expected, 5)), strict=True
    ):
        assert (mine - others).abs().max() <= 1e-5


def test_the_gradient_is_the_merged_weight_s_through_the_product(base: Path) -> None:
    settings = TrainerConfig(device="cpu", learning_rate=1e-2, max_grad_norm=1e9)
    learner = trained(base, trainer=settings)
    merged(learner, base).save_pretrained(base.parent / "merged")
    plain = make(base.parent / "merged", lora=None, trainer=settings)
    found: list[dict[str, torch.Tensor]] = []
    for each in (learner, plain):
        caught: dict[str, torch.Tensor] = {}
        parameters = dict(each.model.module.named_parameters())
        each.optimizer.register_step_pre_hook(
            lambda *_, caught=caught, parameters=parameters: caught.update(
                {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
            )
        )
        weights = {name: p.detach().clone() for name, p in parameters.items()}
        each.step(batch(each, 5))
        found.append(caught)
        if each is learner:
            masters = weights
    adapters, dense = found
    assert all(name.endswith(("lora_A", "lora_B")) for name in adapters)
    for name, gradient in adapters.items():
        owner = name.rpartition(".")[0]
        whole = 2.0 * dense[f"{owner}.weight"]
        factors = {
            "lora_A": masters[f"{owner}.lora_B"].T @ whole,
            "lora_B": whole @ masters[f"{owner}.lora_A"].T,
        }
        assert torch.allclose(gradient, factors[name.rpartition(".")[2]], rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_base_is_frozen_in_the_run_s_type_and_adapters_have_float32_masters(base: Path, checkpointing) -> None:
    settings = TrainerConfig(device="cpu", learning_rate=1e-2, gradient_checkpointing=checkpointing)
    learner = make(base, dtype="bfloat16", trainer=settings)
    frozen = {n: p for n, p in learner.model.module.named_parameters() if not n.endswith(("lora_A", "lora_B"))}
    before = {name: parameter.detach().clone() for name, parameter in frozen.items()}
    learner.step(batch(learner))
    learner.step(batch(learner, 1))
    assert all(torch.equal(parameter, before[name]) for name, parameter in frozen.items())
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in frozen.values())
    assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
    assert {t.dtype for t in learner.published_weights().values()} == {torch.bfloat16}
    held = {id(p) for group in learner.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in learner.model.parameters()} and len(held) == 28


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base_without_a_model_of_its_own(base: Path, dtype: str) -> None:
    learner = trained(base, dtype=dtype, objective=KL)
    assert isinstance(learner.scorer.reference, BaseOfAdapter)
    other = make(base, dtype=dtype, lora=None, objective=KL)
    assert isinstance(other.scorer.reference, PackedModel)
    _, mine = learner.scorer.step_constants(batch(learner, 3))
    _, others = other.scorer.step_constants(batch(other, 3))
    for one, two in zip(mine[0], others[0], strict=True):
        assert torch.equal(one.reference_logprobs, two.reference_logprobs)
    with_adapter = proximal_logprobs(learner, batch(learner, 3))
    assert not torch.equal(with_adapter[0], mine[0][0].reference_logprobs), "the adapter is on again"


def test_kl_in_the_reward_is_against_the_base_too(base: Path) -> None:
    learner = trained(base, advantage=AdvantageConfig(kl_coefficient=0.1))
    assert isinstance(learner.scorer.reference, BaseOfAdapter)


def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(base: Path, tmp_path: Path) -> None:
    whole = trained(base, steps=4).published_weights()
    learner = trained(base, steps=2)
    learner.begin_checkpoint(tmp_path / "tensors").result()
    stored = load_file(tmp_path / "tensors" / "rank-0.safetensors")
    assert {name.rpartition(".")[2] for name in stored} == {"lora_A", "lora_B"}
    assert sum(tensor.nbytes for name, tensor in stored.items() if name.startswith("masters/")) < 40_000
    state = json.loads(json.dumps(learner.state()))
    resumed = make(base)
    resumed.load_checkpoint(tmp_path / "tensors", state)
    for seed in (2, 3):
        resumed.step(batch(resumed, seed))
    assert all(torch.equal(tensor, whole[name]) for name, tensor in resumed.published_weights().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, r"lora.rank = 4: the adapter in \S+ has 3; expected that"),
        ({"alpha": 3.0}, r"lora.alpha = 3.0: the adapter in \S+ has 6.0; expected that"),
        ({"targets": ("q_proj",)}, r"lora.targets = \('q_proj',\): the adapter in \S+ has \('q_proj', 'k_proj'"),
        (None, r"lora: \S+ holds an adapter; expected \[lora\] as it was"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(base: Path, tmp_path: Path, change, message: str) -> None:
    learner = trained(base, steps=1)
    learner.begin_checkpoint(tmp_path / "tensors").result()
    other = make(base, lora=msgspec.structs.replace(LORA, **change) if change else None)
    with pytest.raises(ConfigError, match=message):
        other.load_checkpoint(tmp_path / "tensors", learner.state())


def test_a_checkpoint_of_all_weights_and_an_adapter_of_another_base_are_refused(base: Path, tmp_path: Path) -> None:
    plain = make(base, lora=None)
    plain.begin_checkpoint(tmp_path / "plain").result()
    with pytest.raises(ConfigError, match=r"lora: \S+ holds all weights; expected no \[lora\]"):
        make(base).load_checkpoint(tmp_path / "plain", plain.state())
    learner = trained(base, steps=1)
    learner.begin_checkpoint(tmp_path / "tensors").result()
    tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"model.path = '\S+/other': \S+ holds an adapter of another base: digest"):
        make(tmp_path / "other").load_checkpoint(tmp_path / "tensors", learner.state())


def test_targets_that_the_model_lacks_are_named_with_those_that_it_has(base: Path) -> None:
    lora = LoraConfig(targets=("q_proj", "query_key_value", "lm_head"))
    with pytest.raises(
        ConfigError,
        match=r"lora.targets = \['q_proj', 'query_key_value', 'lm_head'\]: the blocks of model.path = '\S+' have no "
        r"linear layer query_key_value, lm_head; expected some of down_proj, gate_proj, k_proj, o_proj, q_proj,",
    ):
        make(base, lora=lora)


def test_a_checkpoint_becomes_peft_s_folder_which_peft_loads_and_merges(base: Path, tmp_path: Path) -> None:
    import peft  # takes seconds, and this test alone needs it

    learner = trained(base)
    learner.begin_checkpoint(tmp_path / "tensors").result()
    learner.export(tmp_path / "tensors", base, tmp_path / "adapter", "float32")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    published = learner.published_weights()
    assert stored.keys() == published.keys()
    assert all(torch.equal(tensor, published[name]) for name, tensor in stored.items())
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (3, 6.0, str(base))
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    expected = logits(merged(learner, base))
    assert (logits(loaded) - expected).abs().max() <= 1e-5
    assert (logits(loaded.base_model.model) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_becomes_a_whole_model_with_the_adapter_merged(base: Path, tmp_path: Path, dtype: str) -> None:
    learner = trained(base)
    learner.begin_checkpoint(tmp_path / "tensors").result()
    adapter = learner.export.args[0]
    export_merged(adapter, base, tmp_path / "tensors", base, tmp_path / "merged", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    expected = merged(learner, base).to(getattr(torch, dtype)).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.allclose(tensor, expected[name], atol=1e-6) for name, tensor in loaded.state_dict().items())
    tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"other: digest \w+; expected the base of the adapter, the model that was"):
        export_merged(adapter, tmp_path / "other", tmp_path / "tensors", base, tmp_path / "out", dtype)
