"""Decoupled PPO: what its proximal policy may be, and the cap on the total weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from objective_cases import changed, gradients, packed_inputs
from penstock.consumers.learning.objectives.decoupled_ppo import DecoupledPpo, interpolated_proximal
from penstock.consumers.learning.objectives.grpo import Grpo

METHODS = st.sampled_from(["loglinear", "linear"])


def test_with_the_recomputed_proximal_policy_it_is_grpo_to_the_bit() -> None:
    inputs = packed_inputs(0, kept=0.8)
    for found, expected in zip(gradients(DecoupledPpo(), inputs), gradients(Grpo(), inputs), strict=True):
        assert torch.equal(found, expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), METHODS, st.sampled_from([0.5, 2.0, 8.0]), st.sampled_from([1.0, 1.5, 5.0]))
def test_no_token_weighs_more_than_the_cap(seed, method, drift, cap) -> None:
    inputs = packed_inputs(seed, drift=drift)
    inputs = changed(inputs, importance_weights=torch.ones_like(inputs.advantages))
    gradient = gradients(DecoupledPpo(proximal=method, total_weight_cap=cap), inputs)[1]
    bound = cap * inputs.advantages.abs() / inputs.denominator
    assert (gradient.abs() <= bound * (1 + 1e-12)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), METHODS)
def test_an_unclipped_token_below_the_cap_weighs_current_over_behavior(seed, method) -> None:
    inputs = packed_inputs(seed)
    inputs = changed(inputs, importance_weights=torch.ones_like(inputs.advantages))
    objective = DecoupledPpo(proximal=method, total_weight_cap=1e9, clip_low=1.0, clip_high=1e9)
    total = torch.exp(inputs.current_logprobs - inputs.behavior_logprobs).detach()
    expected = -total * inputs.advantages / inputs.denominator
    torch.testing.assert_close(gradients(objective, inputs)[1], expected, rtol=1e-12, atol=0)


def test_without_the_cap_the_clip_would_let_the_total_weight_grow_with_lag() -> None:
    lag = 16
    one = torch.ones(1, dtype=torch.float64)
    inputs = changed(
        packed_inputs(0, (1,)),
        current_logprobs=(-1 * one).requires_grad_(),
        behavior_logprobs=-1 - lag * torch.log(1.199 * one),
        advantages=one,
        importance_weights=one,
        lag=torch.tensor([lag]),
    )
    factor = inputs.denominator
    uncapped = DecoupledPpo(proximal="loglinear", total_weight_cap=1e9)
    assert -factor * gradients(uncapped, inputs)[1].item() == pytest.approx(1.199**lag, rel=1e-9)
    capped = DecoupledPpo(proximal="loglinear", total_weight_cap=5.0)
    assert -factor * gradients(capped, inputs)[1].item() == pytest.approx(5.0, rel=1e-9)
    assert capped(inputs).metrics["total_weight_capped_frac"] == 1


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_the_proximal_policy_lies_between_and_nears_the_current_one_with_lag(method) -> None:
    lag = torch.arange(10)
    behavior, current = torch.full((10,), -2.0).double(), torch.full((10,), -1.0).double()
    found = interpolated_proximal(behavior, current, lag, method)
    assert torch.equal(found[:2], behavior[:2])
    assert (found.diff()[1:] > 0).all()
    assert (found < current).all()


def test_an_interpolation_without_lags_is_refused() -> None:
    objective = DecoupledPpo(proximal="linear", total_weight_cap=2.0)
    with pytest.raises(ValueError, match="DecoupledPpo: lag is None with proximal = 'linear'"):
        objective(changed(packed_inputs(0), lag=None))
