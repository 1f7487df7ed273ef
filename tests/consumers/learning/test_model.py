"""The model around a step: what it publishes, what it refuses to load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, CohereForCausalLM

from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.loss.scoring import head_logprobs
from penstock.consumers.learning.model import attention, model_check, packed_model
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.consumers.learning.model.model_check import ModelCheckError, check_model
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.schemas.config import ConfigError, ModelConfig, Plug, TrainerConfig
from training_groups import VOCABULARY, configuration, lag_from, random_group, tiny_model


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


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(folder, tmp_path) -> None:
    tiny_model(tmp_path / "smaller", hidden_size=8)
    tiny_model(tmp_path / "deeper", num_hidden_layers=3)
    models = {name: Learner(configuration(tmp_path / name)) for name in ("smaller", "deeper")}
    for name, other in models.items():
        other.begin_checkpoint(tmp_path / f"saved-{name}").result()
    learner = Learner(configuration(folder))
    with pytest.raises(
        ConfigError, match=r"another model: masters/\S+ is \[\d+, 8\], in the model \[\d+, \d+\]; .*more"
    ):
        learner.load_checkpoint(tmp_path / "saved-smaller", learner.state())
    with pytest.raises(ConfigError, match=r"another model: has masters/model.layers.2.\S+, which the model has not"):
        learner.load_checkpoint(tmp_path / "saved-deeper", learner.state())
    learner.begin_checkpoint(tmp_path / "saved").result()
    with pytest.raises(ConfigError, match=r"another model: lacks masters/model.layers.2.\S+"):
        models["deeper"].load_checkpoint(tmp_path / "saved", learner.state())


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


def test_a_frozen_model_is_held_as_published_and_computes_the_same_bits(folder) -> None:
    config = configuration(folder, model=ModelConfig(path=str(folder), dtype="bfloat16"))
    masters, frozen = (PackedModel(str(folder), "bfloat16", torch.device("cpu"), frozen=each) for each in (False, True))
    assert {(p.dtype, p.requires_grad) for p in frozen.module.parameters()} == {(torch.bfloat16, False)}
    microbatch = _batch(config).microbatches[0]
    (hidden, head), (expected_hidden, expected_head) = frozen.forward(microbatch), masters.forward(microbatch)
    for found, expected in ((hidden, expected_hidden), (head.weight, expected_head.weight)):
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize("scale", [0.0625, 0.3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_logit_scale_is_applied_without_rounding(tmp_path, dtype, scale) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = sizes | {"vocab_size": VOCABULARY, "num_key_value_heads": 1, "logit_scale": scale, "pad_token_id": 0}
    CohereForCausalLM(CohereConfig(initializer_range=0.5, **settings)).save_pretrained(tmp_path)
    model = PackedModel(str(tmp_path), dtype, torch.device("cpu"))
    microbatch = _batch(configuration(tmp_path)).microbatches[0]
    with torch.no_grad():
        hidden, head = model.run(microbatch.token_ids, microbatch.position_ids, microbatch.layout)
        assert hidden.dtype == getattr(torch, dtype)
        logits = (
            hidden[microbatch.predicting].double() @ head.weight.double().t() * scale / microbatch.temperature[:, None]
        )
        found, _ = head_logprobs(*model.forward(microbatch), microbatch)
    expected = logits.log_softmax(1).gather(1, microbatch.targets[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def _bare(model: PackedModel) -> ModelCheckError:
    """The error of a check after the model was changed."""
    with pytest.raises(ModelCheckError) as caught:
        check_model(model.module, model.forward)
    return caught.value


def test_the_check_names_the_comparison_that_failed(folder, monkeypatch) -> None:
    model = PackedModel(str(folder), "float32", torch.device("cpu"))
    check_model(model.module, model.forward)
    layer = model.module.model.layers[0].mlp

    def noisy(hidden: torch.Tensor) -> torch.Tensor:
        return type(layer).forward(layer, torch.nn.functional.dropout(hidden, 0.1))

    def leaking(hidden: torch.Tensor) -> torch.Tensor:
        return type(layer).forward(layer, hidden + hidden.roll(1, dims=1))

    monkeypatch.setattr(layer, "forward", noisy)
    assert "differ between two passes over the same rows" in str(_bare(model))
    monkeypatch.setattr(layer, "forward", leaking)
    assert "of a row beside another differ from those of the row alone" in str(_bare(model))
    monkeypatch.undo()
    monkeypatch.setattr(model, "_logit_scale", 0.5)
    assert "differ from those of transformers' own forward pass, by" in str(_bare(model))
    monkeypatch.undo()
    monkeypatch.setattr(layer, "forward", lambda hidden: hidden[..., :3])
    assert "cannot be run over packed rows: The size of tensor a" in str(_bare(model))


def test_the_check_leaves_the_model_and_the_random_generator_as_they_were(folder) -> None:
    model = PackedModel(str(folder), "bfloat16", torch.device("cpu"), gradient_checkpointing=True)
    before = [(name, module.training) for name, module in model.module.named_modules()]
    state, config = torch.get_rng_state(), model.module.config.to_dict()
    check_model(model.module, PackedModel(str(folder), "float32", torch.device("cpu")).forward)
    assert [(name, module.training) for name, module in model.module.named_modules()] == before
    assert {name for name, training in before if training} == {"model.layers.0", "model.layers.1"}
    assert torch.equal(torch.get_rng_state(), state) and model.module.config.to_dict() == config
    assert model.module.config._attn_implementation == IMPLEMENTATION


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(("rope", "longest"), [(LONGROPE, 16), (LONGROPE, 64), (DYNAMIC, 64)])
def test_rotary_frequencies_are_the_engine_s_whatever_is_packed_together(tmp_path, rope, longest) -> None:
    tiny_model(tmp_path, head_dim=8, max_position_embeddings=16 if rope is DYNAMIC else 64, rope_parameters=rope)
    model = PackedModel(str(tmp_path), "float32", torch.device("cpu"), max_model_len=longest)
    generator = torch.Generator().manual_seed(0)
    short, long = (torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (10, 40))
    with torch.no_grad():
        alone, beside = (
            model_check._logprobs(rows, model.forward, torch.device("cpu"), False) for rows in ([short], [long, short])
        )
    exponents = torch.arange(0, 8, 2) / 8
    factor = 4.0 if rope is LONGROPE and longest > 16 else 1.0
    torch.testing.assert_close(model.module.model.rotary_emb.inv_freq, 1 / (factor * 10000.0**exponents))
    torch.testing.assert_close(beside[-len(alone) :], alone, rtol=0, atol=1e-5)


def test_a_head_that_the_configuration_contradicts_is_refused(folder, tmp_path) -> None:
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    for head, refused in ((embedding.clone(), False), (embedding + 1, True)):
        save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        if refused:
            with pytest.raises(ConfigError, match=r"tie_word_embeddings = true in its config\.json, and"):
                PackedModel(str(folder), "float32", torch.device("cpu"))
        else:
            PackedModel(str(folder), "float32", torch.device("cpu"))
    tiny_model(tmp_path / "untied", tied=False)
    weights = load_file(tmp_path / "untied" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "untied" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks the weights .*lm_head\.weight"):
        PackedModel(str(tmp_path / "untied"), "float32", torch.device("cpu"))


def test_the_check_runs_the_attention_that_training_runs(folder, monkeypatch, caplog) -> None:
    def leaking(flat, layout, head_dim, *others):
        attended = attention._in_rectangles(flat, layout, head_dim, *others)
        return attended + attended.mean(0) if len(attended) > 10 else attended  # the short row has 10 tokens

    monkeypatch.setattr(attention, "is_unpadded", lambda device, dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(packed_model, "is_unpadded", attention.is_unpadded)
    monkeypatch.setattr(attention, "_unpadded", attention._in_rectangles)
    PackedModel(str(folder), "bfloat16", torch.device("cpu"))
    monkeypatch.setattr(attention, "_unpadded", leaking)
    assert not PackedModel(str(folder), "float32", torch.device("cpu")).in_rectangles
    assert PackedModel(str(folder), "bfloat16", torch.device("cpu")).in_rectangles
    assert "rows leak" in caplog.text


def test_weight_decay_moves_no_parameter_without_a_gradient(folder) -> None:
    trainer = TrainerConfig(device="cpu", learning_rate=0.1, weight_decay=0.5)
    weights = []
    for unreached in (None, torch.zeros_like):  # on one process, and on several ranks
        learner = Learner(configuration(folder, trainer=trainer))
        before = [parameter.clone() for parameter in learner.model.parameters()]
        for number, parameter in enumerate(learner.model.parameters()):
            parameter.grad = torch.ones_like(parameter) if number else unreached and unreached(parameter)
        norms = learner._grad_norms()
        learner._update(norms, norms.norm())
        after = learner.model.parameters()
        moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
        assert not moved[0] and all(moved[1:])
        weights.append([parameter.detach().clone() for parameter in after])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
