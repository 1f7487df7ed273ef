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
from training_groups import VOCABULARY, configuration, lag_from, random_groups, tiny_model


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """The folder of a tiny model whose files a test changes."""
    tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _batch(config):
    return pack(random_groups(), lag_from(7), config)


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("bfloat16", False)])
def test_published_weights_are_what_save_pretrained_would_write_and_do_not_move_with_a_step(
    tmp_path, tied, dtype
) -> None:
    tiny_model(tmp_path, tied=tied)
    learner = Learner(configuration(tmp_path, model=ModelConfig(path=str(tmp_path), dtype=dtype)))
    published = learner.published_weights()
    learner.step(_batch(learner.config))
    written = load_file(tmp_path / "model.safetensors")
    assert published.keys() == written.keys()
    assert ("lm_head.weight" in published) != tied
    for name, tensor in published.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, written[name].to(tensor.dtype))
    assert len({tensor.data_ptr() for tensor in published.values()}) == len(published)
    assert any(not torch.equal(learner.published_weights()[name], tensor) for name, tensor in published.items())


def test_what_a_run_cannot_train_with_is_refused_by_its_field(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    grpo = "penstock.consumers.learning.objectives.grpo:Grpo"
    for name, path, changes, message in (
        ("folder", tmp_path / "nowhere", {}, r"model.path = '.*nowhere': expected a folder"),
        ("device", folder, {"trainer": TrainerConfig(device="cuda")}, r"trainer\.device = 'cuda'"),
        (
            "shape",
            folder,
            {"objective": Plug(path="penstock.schemas.keys:Kind")},
            r"expected Objective.__call__\(self, in",
        ),
        ("argument", folder, {"objective": Plug(path=grpo, kwargs={"clip_low": 7})}, "clip_low is 7"),
    ):
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{name}: {Learner(configuration(path, **changes))}")


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(folder, tmp_path) -> None:
    tiny_model(tmp_path / "smaller", hidden_size=8)
    tiny_model(tmp_path / "deeper", num_hidden_layers=3)
    paths = {"tiny": folder, "smaller": tmp_path / "smaller", "deeper": tmp_path / "deeper"}
    learners = {name: Learner(configuration(path)) for name, path in paths.items()}
    for name, learner in learners.items():
        learner.begin_checkpoint(tmp_path / f"saved-{name}").result()
    for saved, loading, difference in (
        ("smaller", "tiny", r"masters/\S+ is \[\d+, 8\], in the model \[\d+, \d+\]; .*more"),
        ("deeper", "tiny", r"has masters/model.layers.2.\S+, which the model has not"),
        ("tiny", "deeper", r"lacks masters/model.layers.2.\S+"),
    ):
        with pytest.raises(ConfigError, match=f"another model: {difference}"):
            learners[loading].load_checkpoint(tmp_path / f"saved-{saved}", learners[saved].state())


def test_a_frozen_model_is_held_as_published_and_computes_the_same_bits(folder) -> None:
    config = configuration(folder, model=ModelConfig(path=str(folder), dtype="bfloat16"))
    masters, frozen = (PackedModel(str(folder), "bfloat16", torch.device("cpu"), frozen=each) for each in (False, True))
    assert {(p.dtype, p.requires_grad) for p in frozen.module.parameters()} == {(torch.bfloat16, False)}
    microbatch = _batch(config).microbatches[0]
    (hidden, head), (expected_hidden, expected_head) = frozen.forward(microbatch), masters.forward(microbatch)
    for found, expected in ((hidden, expected_hidden), (head.weight, expected_head.weight)):
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected)


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 0.0625), ("bfloat16", 0.3)])
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
        logits = hidden[microbatch.predicting].double() @ head.weight.double().t() * scale
        found, _ = head_logprobs(*model.forward(microbatch), microbatch)
    expected = (logits / microbatch.temperature[:, None]).log_softmax(1).gather(1, microbatch.targets[:, None])[:, 0]
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


@pytest.mark.parametrize(
    ("rope", "longest", "growth"),
    [(LONGROPE, 16, 1), (LONGROPE, 64, 1), (DYNAMIC, 64, 1), (DYNAMIC | {"alpha": 3.0}, 64, 3),
     (DYNAMIC | {"max_trained_positions": 8}, 64, 4 * 16 / 8 - 3)],
)  # fmt: skip
def test_rotary_frequencies_are_the_engine_s_whatever_is_packed_together(tmp_path, rope, longest, growth) -> None:
    positions = 64 if rope is LONGROPE else 16
    tiny_model(tmp_path, head_dim=8, max_position_embeddings=positions, rope_parameters=rope)
    model = PackedModel(str(tmp_path), "float32", torch.device("cpu"), max_model_len=longest)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (10, 40)]
    short, long = map(model_check._Row, rows)
    with torch.no_grad():
        alone, beside = (
            model_check._logprobs(rows, model.forward, torch.device("cpu"), False) for rows in ([short], [long, short])
        )
    exponents = torch.arange(0, 8, 2) / 8
    factor = 4.0 if rope is LONGROPE and longest > 16 else 1.0
    base = 10000.0 * growth ** (8 / 6)
    torch.testing.assert_close(model.module.model.rotary_emb.inv_freq, 1 / (factor * base**exponents))
    torch.testing.assert_close(beside[-len(alone) :], alone, rtol=0, atol=1e-5)


def test_weights_that_are_missing_and_a_head_that_the_configuration_contradicts_are_refused(changed, tmp_path) -> None:
    tiny_model(tmp_path / "untied", tied=False)
    tied, untied = (load_file(path / "model.safetensors") for path in (changed, tmp_path / "untied"))
    embedding = tied["model.embed_tokens.weight"]
    _save(changed, tied | {"lm_head.weight": embedding.clone()})
    PackedModel(str(changed), "float32", torch.device("cpu"))
    for path, weights, missing, message in (
        (changed, tied | {"lm_head.weight": embedding + 1}, "", r"tie_word_embeddings = true in its config\.json, and"),
        (changed, tied, "model.norm.weight", r"lacks the weights \['model.norm.weight'\]"),
        (tmp_path / "untied", untied, "lm_head.weight", r"lacks the weights .*lm_head\.weight"),
    ):
        _save(path, {name: tensor for name, tensor in weights.items() if name != missing})
        with pytest.raises(ConfigError, match=message):
            PackedModel(str(path), "float32", torch.device("cpu"))


def test_the_check_runs_the_attention_that_training_runs(folder, monkeypatch, caplog) -> None:
    def leaking(flat, layout, head_dim, *others):
        attended = attention._in_rectangles(flat, layout, head_dim, *others)
        return attended + attended.mean(0) if len(attended) > 10 else attended  # the short row has 10 tokens

    monkeypatch.setattr(attention, "is_unpadded", lambda device, dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(packed_model, "is_unpadded", attention.is_unpadded)
    monkeypatch.setattr(attention, "unpadded", attention._in_rectangles)
    PackedModel(str(folder), "bfloat16", torch.device("cpu"))
    monkeypatch.setattr(attention, "unpadded", leaking)
    assert PackedModel(str(folder), "float32", torch.device("cpu")).arrangement == "packed"
    assert PackedModel(str(folder), "bfloat16", torch.device("cpu")).arrangement == "rectangles"
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
        learner._update(norms, norms.norm(), 0.1)
        after = learner.model.parameters()
        moved = [not torch.equal(old, new) for old, new in zip(before, after, strict=True)]
        assert not moved[0] and all(moved[1:])
        weights.append([parameter.detach().clone() for parameter in after])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
