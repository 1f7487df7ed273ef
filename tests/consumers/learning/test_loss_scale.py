"""A float16 body: gradients against float64, the loss scale that carries them, and what it is not to blame for."""

import logging
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp64_oracle import grpo_loss
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.loss_scale import GROW_AFTER, START, LossScale
from penstock.schemas.config import ModelConfig, TrainerConfig
from training_groups import configuration, gradients_of, lag_from, random_groups, weights_of

UNCLIPPED = TrainerConfig(device="cpu", learning_rate=1e-2, max_grad_norm=1e9)


def _learner(folder: Any, dtype: str = "float16") -> Learner:
    model = ModelConfig(path=str(folder), dtype=dtype)  # type: ignore[arg-type]
    return Learner(configuration(folder, model=model, trainer=UNCLIPPED))


def _step(learner: Learner, factor: float = 1.0):
    """Takes a step on a loss that is multiplied by `factor`, as tiny advantages would."""
    objective = learner.scorer.objective

    def small(inputs: LossInputs) -> LossOutputs:
        found = objective(inputs)
        return LossOutputs(loss=found.loss * factor, metrics=found.metrics)

    learner.scorer.objective = small
    report = learner.step(learner.pack(random_groups(), lag_from(7)))
    learner.scorer.objective = objective
    return report


@pytest.mark.parametrize(("factor", "scale"), [(1.0, START), (1e-6, START), (1.0, 2.0**30), (1e-6, 2.0**30)])
def test_gradients_of_a_float16_body_are_those_of_float64_to_its_precision(folder, factor, scale) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).double()
    (grpo_loss(oracle, random_groups(), lag_from(7), lag_bound=4, threshold=2.0) * factor).backward()
    learner = _learner(folder)
    learner.loss_scale.value = scale
    gradients = gradients_of(learner)
    report = _step(learner, factor)
    expected = {name: p.grad.flatten() for name, p in oracle.named_parameters()}
    found, wanted = (
        torch.cat([each[name].double().flatten() for name in expected]) for each in (gradients[0], expected)
    )
    assert torch.cosine_similarity(found, wanted, 0) > 0.99999
    assert (found - wanted).norm() < 5e-3 * wanted.norm()
    assert report.metrics["grad_norm"] == pytest.approx(wanted.norm().item(), rel=5e-3)
    assert report.num_optimizer_steps == 1 and report.steps_skipped == {}
    assert (learner.loss_scale.value < scale) == (scale > START and factor == 1.0), "halved where it overflows only"


def test_without_the_scale_small_gradients_are_lost(folder) -> None:
    learner = _learner(folder)
    learner.loss_scale.value = 1.0
    gradients = gradients_of(learner)
    _step(learner, 1e-6)
    elements = torch.cat([gradient.flatten() for gradient in gradients[0].values()])
    assert (elements == 0).float().mean() > 0.9


def test_a_gradient_that_is_infinite_at_any_scale_is_the_objectives_fault(folder) -> None:
    learner = _learner(folder)
    before = weights_of(learner)
    learner.scorer.objective = lambda inputs: LossOutputs(
        loss=(inputs.current_logprobs - inputs.proximal_logprobs).abs().sqrt().sum()
    )
    report = learner.step(learner.pack(random_groups(), lag_from(7)))
    assert report.skipped_reason == "gradient norm is not finite" and learner.loss_scale.value == START
    assert all(torch.equal(before[name], after) for name, after in weights_of(learner).items())


def test_the_scale_doubles_after_steps_without_overflow_and_halves_at_one() -> None:
    scale, other = LossScale(enabled=True), LossScale(enabled=False)
    for _ in range(GROW_AFTER):
        assert scale.value == START
        scale.count_step()
        other.count_step()
    assert (scale.value, other.value) == (2 * START, 1.0)
    scale.count_step()
    scale.halve()
    resumed = LossScale(enabled=True)
    resumed.load(scale.state())
    assert resumed.state() == scale.state() == {"value": START, "num_steps": 0}


def test_a_resumed_learner_has_the_scale_and_continues_with_equal_bits(folder, tmp_path, caplog) -> None:
    learner = _learner(folder)
    learner.loss_scale.value = 2.0**24
    with caplog.at_level(logging.INFO):
        _step(learner)
    assert "gradients overflow float16 at a loss scale of 1.67772e+07" in caplog.text
    learner.begin_checkpoint(tmp_path / "saved").result()
    state, expected = learner.state(), _step(learner).metrics
    assert START < state["loss_scale"]["value"] < 2.0**24
    resumed = _learner(folder)
    resumed.load_checkpoint(tmp_path / "saved", state)
    assert _step(resumed).metrics == expected and math.isfinite(expected["loss"])
    assert all(torch.equal(weights_of(learner)[name], after) for name, after in weights_of(resumed).items())
    assert "loss_scale" not in _learner(folder, "bfloat16").state()
