"""One batch in, one optimizer step: gradients against the oracle, skipped steps, precision, state kept."""

import copy
import math
import threading
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fp64_oracle import grpo_loss
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN
from penstock.consumers.learning.model import learner_state
from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.schemas.config import CorrectionConfig, ModelConfig, TrainerConfig
from training_groups import (
    VOCABULARY,
    assert_near,
    configuration,
    gradients_of,
    group_of,
    lag_from,
    proximal_logprobs,
    random_group,
    random_groups,
    segment,
    tiny_model,
    weights_of,
)

UNCLIPPED = TrainerConfig(device="cpu", learning_rate=1e-2, max_grad_norm=1e9)
SMALL = replace(UNCLIPPED, tokens_per_microbatch=30)


def _step(learner: Learner, groups: list, current: int = 7):
    return learner.step(learner.pack(groups, lag_from(current)))


@pytest.mark.parametrize(("tied", "temperature"), [(True, 1.0), (False, 0.6)])
def test_loss_and_gradient_in_one_or_many_micro_batches_equal_those_of_rows_one_by_one(
    tmp_path, tied, temperature
) -> None:
    oracle = tiny_model(tmp_path, tied=tied).double()
    groups = [*random_groups(temperature=temperature), random_group(9, 0, rewards=[1.0] * 4)]
    loss = grpo_loss(oracle, groups, lag_from(7), lag_bound=2, threshold=2.0)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in oracle.parameters()))
    reports = []
    for trainer in (UNCLIPPED, SMALL):
        learner = Learner(configuration(tmp_path, max_lag=1, trainer=trainer))
        gradients, batch = gradients_of(learner), learner.pack(groups, lag_from(7))
        assert (len(batch.microbatches) > 3) == (trainer is SMALL)
        reports.append(learner.step(batch))
        assert_near(gradients[0], oracle, 1e-5)
    assert reports[0].num_tokens_masked_lag > 0
    assert reports[0].metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert reports[0].metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert reports[1].metrics == pytest.approx(reports[0].metrics, rel=1e-5)


@pytest.mark.parametrize(("dtype", "tied"), [("float32", True), ("bfloat16", False)])
def test_gradient_checkpointing_changes_no_gradient(tmp_path, monkeypatch, dtype, tied) -> None:
    tiny_model(tmp_path, tied=tied)
    plain = configuration(tmp_path, model=ModelConfig(path=str(tmp_path), dtype=dtype), trainer=UNCLIPPED)
    expected, learner = (
        Learner(replace(plain, trainer=replace(UNCLIPPED, gradient_checkpointing=lean))) for lean in (False, True)
    )
    batch, calls, attention = expected.pack(random_groups(), lag_from(7)), [], ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
    gradients = gradients_of(expected), gradients_of(learner)
    expected.step(batch)
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        IMPLEMENTATION,
        lambda module, query, *args, **kwargs: calls.append(query.dtype) or attention(module, query, *args, **kwargs),
    )
    learner.step(batch)
    assert calls == [getattr(torch, dtype)] * 2 * 2 * len(batch.microbatches)  # two layers, forward and again
    for name, gradient in gradients[0][0].items():
        assert torch.equal(gradients[1][0][name], gradient), name


def test_a_report_has_finite_numbers_and_counts_what_the_lag_bound_masks(folder) -> None:
    learner = Learner(configuration(folder, max_lag=1))
    batch = learner.pack(random_groups(), lag_from(7))
    report = learner.step(batch)
    names = {"reward", "loss", "entropy", "chi2", "ess_fraction", "rollout_correction/kl", "grad_norm", "learning_rate"}
    assert names <= report.metrics.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in report.metrics.values())
    assert report.lag_histogram == batch.lag_histogram
    num_sampled = sum(report.lag_histogram.values())
    assert report.num_tokens_trained + report.num_tokens_masked_lag == num_sampled
    assert report.metrics["masked_frac"] == pytest.approx(report.num_tokens_masked_lag / num_sampled) != 0
    assert (report.metrics["masked_frac/lag_1"], report.metrics["masked_frac/lag_4-7"]) == (0, 1)
    assert report.metrics["policy_clipped_frac"] == 0
    assert 0 < report.metrics["entropy"] < math.log(VOCABULARY)


def test_the_mismatch_at_lag_0_is_the_mean_gap_of_rows_that_are_fresh_throughout(folder) -> None:
    fresh = segment([1, 2, 3, 4, 5], [(2, 5)], [7, 7, 7], [-1.0, -2.0, -3.0])
    mixed = segment([1, 2, 6, 7, 8], [(2, 5)], [6, 7, 7], [-9.0, -9.0, -9.0])
    learner = Learner(configuration(folder))
    batch = learner.pack([group_of(1, [[fresh], [mixed]], [0.0, 1.0])], lag_from(7))
    (proximal,), (part,) = proximal_logprobs(learner, batch), batch.microbatches
    gaps = (proximal - part.behavior_logprobs).abs()[part.behavior_logprobs > -5]
    assert len(gaps) == 3
    assert learner.step(batch).metrics["mismatch_lag0"] == pytest.approx(gaps.mean().item(), rel=1e-6)


def test_a_batch_with_nothing_to_train_takes_no_step_and_is_measured_all_the_same(folder) -> None:
    """Past the lag bound, without variance, or rejected by the correction throughout."""
    flat = [random_group(index, 0, rewards=[0.5] * 4) for index in (1, 2)]
    rejected = [[segment([1, 2, 3 + s], [(2, 3)], [7], [-50.0])] for s in range(2)]
    masks: dict[str, Any] = {"correction": CorrectionConfig(mode="token_mask", threshold=1.0)}
    for name, groups, current, changes, measured in (
        ("stale", random_groups(), 50, {}, {"masked_frac": 1, "loss": 0}),
        ("flat", flat, 7, {}, {"loss": 0, "policy_clipped_frac": 0}),
        ("rejected", [group_of(1, rejected, [0.0, 1.0])], 7, masks, {"rollout_correction/clipped_frac": 1}),
    ):
        learner = Learner(configuration(folder, **changes))
        before = weights_of(learner)
        report = _step(learner, groups, current)
        assert report.skipped_reason == NOTHING_TO_TRAIN, name
        assert report.num_optimizer_steps == learner.num_steps == 0, name
        assert report.num_tokens_trained == (2 if name == "rejected" else 0), name
        assert {key: report.metrics[key] for key in measured} == measured, name
        assert ("chi2" in report.metrics) == (name != "stale"), name
        assert all(torch.equal(before[key], after) for key, after in weights_of(learner).items()), name


def _poisoned(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.current_logprobs.sum() * float("nan"))


def _steep(inputs: LossInputs) -> LossOutputs:
    """Its loss is finite and its gradient infinite."""
    return LossOutputs(loss=(inputs.current_logprobs - inputs.proximal_logprobs).abs().sqrt().sum())


def test_a_step_that_is_not_finite_never_reaches_the_weights(folder) -> None:
    learner = Learner(configuration(folder))
    _step(learner, random_groups())
    before, state = weights_of(learner), copy.deepcopy(learner.optimizer.state_dict())
    objective = learner.scorer.objective
    for broken, reason in ((_poisoned, "loss is not finite"), (_steep, "gradient norm is not finite")):
        learner.scorer.objective = broken
        assert _step(learner, random_groups(seed=1)).skipped_reason == reason
        assert learner.num_steps == 1
        assert all(torch.equal(before[name], after) for name, after in weights_of(learner).items())
        assert str(learner.optimizer.state_dict()) == str(state)
    learner.scorer.objective = objective
    assert _step(learner, random_groups(seed=2)).skipped_reason is None, "as if nothing had happened"


def test_bfloat16_runs_on_the_published_values_with_gradients_for_the_masters(folder) -> None:
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).double()
    loss = grpo_loss(rounded, random_groups(), lag_from(7), lag_bound=4, threshold=2.0)
    loss.backward()
    model = ModelConfig(path=str(folder), dtype="bfloat16")
    learner = Learner(configuration(folder, model=model, trainer=UNCLIPPED))
    hidden, head = learner.model.forward(learner.pack(random_groups(), lag_from(7)).microbatches[0])
    # What the head's 16-bit products on CUDA take: both operands as they are published.
    assert hidden.dtype == head.weight.dtype == torch.bfloat16
    assert torch.equal(head.weight, learner.published_weights()["model.embed_tokens.weight"])
    gradients = gradients_of(learner)
    report = _step(learner, random_groups())
    assert all(p.dtype == torch.float32 for p in learner.model.parameters())
    # The body computes in bfloat16: a regression alarm, not a proof.
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=0.1)
    assert_near(gradients[0], rounded, 0.1)


def _moments(learner: Learner) -> list[dict[str, list]]:
    """The optimizer's state of each parameter, in the model's order."""
    states = [learner.optimizer.state[parameter] for parameter in learner.model.parameters()]
    return [{name: state[name].tolist() for name in sorted(state)} for state in states]


def test_a_resumed_learner_continues_with_equal_bits_or_with_new_settings_of_its_optimizer(
    folder, tmp_path, monkeypatch
) -> None:
    """From what the learner was when its checkpoint was begun, which is written beside the next step."""
    stepped, write = threading.Event(), learner_state.write_tensors
    monkeypatch.setattr(learner_state, "write_tensors", lambda *args: stepped.wait(60) and write(*args))
    trainer = TrainerConfig(device="cpu", learning_rate=1e-2, warmup_steps=10)
    learner = Learner(configuration(folder, trainer=trainer))
    for seed in range(3):
        _step(learner, random_groups(seed=seed))
    writing = learner.begin_checkpoint(tmp_path / "saved")
    saved, state = _moments(learner), learner.state()
    expected = _step(learner, random_groups(seed=3)).metrics
    stepped.set()
    writing.result()
    for changes in ({}, {"betas": (0.5, 0.6)}, {"weight_decay": 0.5}):
        resumed = Learner(configuration(folder, trainer=replace(trainer, **changes)))
        resumed.load_checkpoint(tmp_path / "saved", state)
        assert (resumed.num_steps, _moments(resumed)) == (3, saved)
        metrics = _step(resumed, random_groups(seed=3)).metrics
        assert {name: resumed.optimizer.param_groups[0][name] for name in changes} == changes
        after, name = weights_of(resumed), "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(after[name], weights_of(learner)[name]) == (not changes)
        if not changes:
            assert metrics == expected
            assert all(torch.equal(tensor, after[name]) for name, tensor in weights_of(learner).items())


def test_the_learning_rate_warms_up_to_its_value_and_falls_to_0_at_the_last_step(folder) -> None:
    trainer = TrainerConfig(device="cpu", learning_rate=0.125, warmup_steps=2, decay="linear", num_epochs=2)
    learner = Learner(configuration(folder, trainer=trainer, num_updates=3))
    rates, reported = [], []
    learner.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    for seed in range(2):
        reported.append(_step(learner, random_groups(seed=seed)).metrics["learning_rate"])
        # No step is taken, so that none of the schedule is used up.
        assert _step(learner, [random_group(1, 0, rewards=[0.5] * 4)]).skipped_reason
    assert (rates, reported) == ([0.0625, 0.125, 0.125, 0.09375], [0.0625, 0.125])
    learner.num_steps = 6
    assert _step(learner, random_groups()).metrics["learning_rate"] == 0


def test_gradients_are_clipped_to_the_norm(folder) -> None:
    learner = Learner(configuration(folder, trainer=TrainerConfig(device="cpu", max_grad_norm=1e-3)))
    gradients = gradients_of(learner)
    assert _step(learner, random_groups()).metrics["grad_norm"] > 1e-3
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients[0].values()))
    assert norm == pytest.approx(1e-3, rel=1e-3)
