"""One batch in, one optimizer step: gradients against the oracle, skipped steps, weights out, state kept."""

import copy
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fp64_oracle import grpo_loss
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.schemas.config import CorrectionConfig, ModelConfig, TrainerConfig
from training_groups import (
    VOCABULARY,
    configuration,
    group_of,
    lag_from,
    proximal_logprobs,
    random_group,
    segment,
    tiny_model,
)

UNCLIPPED = TrainerConfig(device="cpu", learning_rate=1e-2, max_grad_norm=1e9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tmp_path / "tiny")
    return tmp_path / "tiny"


def _groups(count: int = 5, seed: int = 0, **changes: Any):
    return [random_group(i, seed, **changes) for i in range(1, count + 1)]


def _gradients(learner: Learner, batch) -> tuple[dict[str, Tensor], Any]:
    """The gradient of one step that is not taken, by parameter name, and the step's report."""
    caught: dict[str, Tensor] = {}
    learner.optimizer.step = lambda: caught.update(
        {name: p.grad.clone() for name, p in learner.model.module.named_parameters()}
    )
    report = learner.step(batch)
    del learner.optimizer.step
    return caught, report


def _weights(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.module.named_parameters()}


def _assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    assert got.keys() == wanted.keys()
    scale = math.sqrt(sum(float(t.double().square().sum()) for t in wanted.values()))
    for name in wanted:
        assert (got[name].double() - wanted[name].double()).norm() <= relative * scale, name


class Poisoned:
    """An objective whose loss is not finite."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(loss=inputs.current_logprobs.sum() * float("nan"))


class Steep:
    """An objective of finite loss and infinite gradient."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(loss=(inputs.current_logprobs - inputs.proximal_logprobs).abs().sqrt().sum())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_loss_and_gradient_equal_those_of_rows_one_by_one(tmp_path, tied, temperature) -> None:
    oracle = tiny_model(tmp_path / "tiny", tied=tied).double()
    config = configuration(tmp_path / "tiny", max_lag=3, trainer=UNCLIPPED)
    groups = [*_groups(temperature=temperature), random_group(9, 0, rewards=[1.0] * 4)]
    loss = grpo_loss(oracle, groups, lag_from(7), lag_bound=3, threshold=2.0)
    loss.backward()
    gradients, report = _gradients(Learner(config), pack(groups, lag_from(7), config))
    assert report.num_tokens_masked_lag > 0
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    _assert_close(gradients, {name: p.grad for name, p in oracle.named_parameters()}, 1e-5)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in oracle.parameters()))
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_micro_batches_give_the_gradient_of_the_whole(folder) -> None:
    groups = _groups(8)
    whole_config = configuration(folder, trainer=UNCLIPPED)
    small = TrainerConfig(device="cpu", max_grad_norm=1e9, tokens_per_microbatch=30)
    parts_config = configuration(folder, trainer=small)
    parts = pack(groups, lag_from(7), parts_config)
    assert len(parts.microbatches) > 3
    whole_gradients, whole = _gradients(Learner(whole_config), pack(groups, lag_from(7), whole_config))
    part_gradients, part = _gradients(Learner(parts_config), parts)
    _assert_close(part_gradients, whole_gradients, 1e-6)
    assert part.metrics == pytest.approx(whole.metrics | {"learning_rate": part.metrics["learning_rate"]}, rel=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_no_gradient(tmp_path, monkeypatch, dtype, tied) -> None:
    tiny_model(tmp_path, tied=tied)
    plain = configuration(tmp_path, model=ModelConfig(path=str(tmp_path), dtype=dtype), trainer=UNCLIPPED)
    lean = msgspec.structs.replace(plain, trainer=msgspec.structs.replace(UNCLIPPED, gradient_checkpointing=True))
    batch = pack(_groups(), lag_from(7), plain)
    expected, _ = _gradients(Learner(plain), batch)
    learner, calls = Learner(lean), []
    attention = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        IMPLEMENTATION,
        lambda module, query, *args, **kwargs: calls.append(query.dtype) or attention(module, query, *args, **kwargs),
    )
    got, _ = _gradients(learner, batch)
    assert calls == [getattr(torch, dtype)] * 2 * 2 * len(batch.microbatches)  # two layers, forward and again
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


def test_a_report_names_what_the_update_lines_need(folder) -> None:
    config = configuration(folder, max_lag=2)
    batch = pack(_groups(), lag_from(7), config)
    report = Learner(config).step(batch)
    names = {"reward", "loss", "entropy", "chi2", "ess_fraction", "rollout_correction/kl", "rollout_correction/k3_kl"}
    names |= {"policy_clipped_frac", "grad_norm", "learning_rate"}
    assert names <= report.metrics.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in report.metrics.values())
    assert report.lag_histogram == batch.lag_histogram
    num_sampled = sum(report.lag_histogram.values())
    assert report.num_tokens_trained + report.num_tokens_masked_lag == num_sampled
    assert report.metrics["masked_frac"] == pytest.approx(report.num_tokens_masked_lag / num_sampled) != 0
    by_lag = {name: value for name, value in report.metrics.items() if name.startswith("masked_frac/")}
    assert by_lag["masked_frac/lag_1"] == 0 and by_lag["masked_frac/lag_4-7"] == 1
    nothing_left = Learner(config).step(pack(_groups(), lag_from(50), config)).metrics
    assert nothing_left["masked_frac"] == 1 and "chi2" not in nothing_left
    assert report.metrics["policy_clipped_frac"] == 0
    assert 0 < report.metrics["entropy"] < math.log(VOCABULARY)


def test_the_mismatch_at_lag_0_is_the_mean_gap_of_rows_that_are_fresh_throughout(folder) -> None:
    config = configuration(folder, max_lag=4)
    runs = [(2, 5)]
    fresh = segment([1, 2, 3, 4, 5], runs, [7, 7, 7], [-1.0, -2.0, -3.0])
    mixed = segment([1, 2, 6, 7, 8], runs, [6, 7, 7], [-9.0, -9.0, -9.0])
    batch = pack([group_of(1, [[fresh], [mixed]], [0.0, 1.0])], lag_from(7), config)
    learner = Learner(config)
    (proximal,) = proximal_logprobs(learner, batch)
    (part,) = batch.microbatches
    gaps = (proximal - part.behavior_logprobs).abs()[part.behavior_logprobs > -5]
    assert len(gaps) == 3
    assert learner.step(batch).metrics["mismatch_lag0"] == pytest.approx(gaps.mean().item(), rel=1e-6)
    stale = pack([group_of(1, [[mixed], [mixed]], [0.0, 1.0])], lag_from(7), config)
    assert "mismatch_lag0" not in learner.step(stale).metrics


def test_a_batch_past_the_lag_bound_takes_no_step_and_says_so(folder) -> None:
    config = configuration(folder, max_lag=0)
    learner = Learner(config)
    before = _weights(learner)
    report = learner.step(pack(_groups(), lag_from(20), config))
    assert report.skipped_reason == NOTHING_TO_TRAIN
    assert report.metrics["loss"] == 0
    assert learner.num_steps == 0
    assert all(torch.equal(before[name], after) for name, after in _weights(learner).items())


def test_a_batch_without_variance_takes_no_step(folder) -> None:
    config = configuration(folder)
    learner = Learner(config)
    batch = pack([random_group(1, 0, rewards=[0.5] * 4)], lag_from(7), config)
    assert learner.step(batch).skipped_reason == NOTHING_TO_TRAIN
    assert learner.num_steps == 0


def test_a_batch_that_the_correction_rejects_throughout_takes_no_step(folder) -> None:
    config = configuration(folder, correction=CorrectionConfig(mode="token_mask", threshold=1.0))
    rows = [[segment([1, 2, 3 + s], [(2, 3)], [7], [-50.0])] for s in range(2)]
    report = Learner(config).step(pack([group_of(1, rows, [0.0, 1.0])], lag_from(7), config))
    assert report.skipped_reason == NOTHING_TO_TRAIN
    assert report.metrics["rollout_correction/clipped_frac"] == 1


@pytest.mark.parametrize(
    ("objective", "reason"), [("Poisoned", "loss is not finite"), ("Steep", "gradient norm is not finite")]
)
def test_a_step_that_is_not_finite_never_reaches_the_weights(folder, monkeypatch, objective, reason) -> None:
    good, config = configuration(folder), configuration(folder)
    learner = Learner(config)
    learner.step(pack(_groups(), lag_from(7), config))
    before, state = _weights(learner), copy.deepcopy(learner.optimizer.state_dict())
    monkeypatch.setattr(learner.scorer, "objective", {"Poisoned": Poisoned, "Steep": Steep}[objective]())
    report = learner.step(pack(_groups(seed=1), lag_from(7), config))
    assert report.skipped_reason == reason
    assert learner.num_steps == 1
    assert all(torch.equal(before[name], after) for name, after in _weights(learner).items())
    assert str(learner.optimizer.state_dict()) == str(state)
    # The next good batch trains as if nothing had happened.
    monkeypatch.undo()
    learner.scorer.objective = Learner(good).scorer.objective
    assert learner.step(pack(_groups(seed=2), lag_from(7), config)).skipped_reason is None


def test_bfloat16_runs_on_the_published_values_with_gradients_for_the_masters(folder) -> None:
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    config = configuration(folder, model=model, trainer=UNCLIPPED)
    groups = _groups()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).double()
    loss = grpo_loss(rounded, groups, lag_from(7), lag_bound=4, threshold=2.0)
    loss.backward()
    learner = Learner(config)
    hidden, head = learner.model.forward(pack(groups, lag_from(7), config).microbatches[0])
    # What the head's 16-bit products on CUDA take: both operands as they are published.
    assert hidden.dtype == head.dtype == torch.bfloat16
    assert torch.equal(head, learner.published_weights()["model.embed_tokens.weight"])
    gradients, report = _gradients(learner, pack(groups, lag_from(7), config))
    assert all(p.dtype == torch.float32 for p in learner.model.parameters())
    # The body computes in bfloat16: a regression alarm, not a proof.
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=0.1)
    _assert_close(gradients, {name: p.grad for name, p in rounded.named_parameters()}, 0.1)


def test_steps_smaller_than_a_bfloat16_step_add_up_in_the_masters(folder) -> None:
    trainer = TrainerConfig(device="cpu", learning_rate=1e-5)
    config = configuration(folder, model=ModelConfig(path=str(folder), dtype="bfloat16"), trainer=trainer)
    learner = Learner(config)
    before = _weights(learner)
    learner.step(pack(_groups(), lag_from(7), config))
    assert any(not torch.equal(before[name], after) for name, after in _weights(learner).items())


def moments(learner: Learner) -> list[dict[str, list]]:
    """The optimizer's state of each parameter, in the model's order."""
    states = [learner.optimizer.state[parameter] for parameter in learner.model.parameters()]
    return [{name: state[name].tolist() for name in sorted(state)} for state in states]


def test_a_resumed_learner_continues_with_equal_bits(folder, tmp_path) -> None:
    config = configuration(folder, trainer=TrainerConfig(device="cpu", learning_rate=1e-2, warmup_steps=10))
    learner = Learner(config)
    for seed in range(3):
        learner.step(pack(_groups(seed=seed), lag_from(7), config))
    learner.begin_checkpoint(tmp_path / "saved").result()
    resumed = Learner(config)
    resumed.load_checkpoint(tmp_path / "saved", learner.state())
    assert resumed.num_steps == 3
    reports = [each.step(pack(_groups(seed=3), lag_from(7), config)) for each in (learner, resumed)]
    assert reports[0].metrics == reports[1].metrics
    expected = _weights(learner)
    assert all(torch.equal(expected[name], after) for name, after in _weights(resumed).items())


def test_a_resumed_learner_goes_on_with_the_optimizer_settings_of_its_own_configuration(folder, tmp_path) -> None:
    def trainer(**changes):
        return configuration(folder, trainer=TrainerConfig(device="cpu", learning_rate=1e-2, **changes))

    learner = Learner(trainer())
    learner.step(pack(_groups(), lag_from(7), learner.config))
    learner.begin_checkpoint(tmp_path / "saved").result()
    saved = moments(learner)
    weights = []
    for changes in ({}, {"betas": (0.5, 0.6)}, {"weight_decay": 0.5}):
        resumed = Learner(trainer(**changes))
        resumed.load_checkpoint(tmp_path / "saved", learner.state())
        optimizer = resumed.optimizer
        assert moments(resumed) == saved
        resumed.step(pack(_groups(seed=1), lag_from(7), resumed.config))
        assert {name: optimizer.param_groups[0][name] for name in changes} == changes
        weights.append(_weights(resumed)["model.layers.0.mlp.up_proj.weight"])
    assert len({str(each.tolist()) for each in weights}) == 3


def test_the_learning_rate_warms_up_to_its_value_and_falls_to_0_at_the_last_step(folder) -> None:
    trainer = TrainerConfig(
        device="cpu", learning_rate=0.125, warmup_steps=2, decay="linear", num_epochs=2, num_minibatches=1
    )
    config = configuration(folder, trainer=trainer, num_updates=3)
    learner = Learner(config)
    rates, take = [], learner.optimizer.step

    def step() -> None:
        rates.append(learner.optimizer.param_groups[0]["lr"])
        take()

    learner.optimizer.step = step
    reported = []
    for seed in range(2):
        reported.append(learner.step(pack(_groups(seed=seed), lag_from(7), config)).metrics["learning_rate"])
        # No step is taken, so that none of the schedule is used up.
        assert learner.step(pack([random_group(1, 0, rewards=[0.5] * 4)], lag_from(7), config)).skipped_reason
    assert rates == [0.0625, 0.125, 0.125, 0.09375]
    assert reported == [0.0625, 0.125]
    learner.num_steps = 6
    assert learner.step(pack(_groups(), lag_from(7), config)).metrics["learning_rate"] == 0


def test_gradients_are_clipped_to_the_norm(folder) -> None:
    config = configuration(folder, trainer=TrainerConfig(device="cpu", max_grad_norm=1e-3))
    gradients, report = _gradients(Learner(config), pack(_groups(), lag_from(7), config))
    assert report.metrics["grad_norm"] > 1e-3
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert norm == pytest.approx(1e-3, rel=1e-3)
