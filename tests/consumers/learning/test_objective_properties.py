"""Properties that every objective has, whatever its formula."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp64_oracle import OracleToken, objective_loss
from objective_cases import OBJECTIVES, changed, gradients, packed_inputs, poisoned, selected
from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.gspo import Gspo
from penstock.consumers.learning.objectives.tvpo import Tvpo

SEEDS = st.integers(0, 2**32)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


def _oracle(name: str, inputs: LossInputs) -> tuple[float, list[float]]:
    fields = ("current_logprobs", "proximal_logprobs", "behavior_logprobs", "importance_weights", "advantages",
              "loss_mask", "entropy", "row_ids", "rollout_tokens", "reference_logprobs", "lag")  # fmt: skip
    columns = [getattr(inputs, field).tolist() for field in fields]
    objective = OBJECTIVES[name]
    return objective_loss(
        type(objective).__name__,
        asdict(objective),
        [OracleToken(*values) for values in zip(*columns, strict=True)],
        denominator=inputs.denominator,
        num_rollouts=inputs.num_rollouts,
    )


@every_objective
@settings(max_examples=25, deadline=None)
@given(SEEDS, LENGTHS, st.sampled_from([0.0, 0.1, 0.5, 1.5]), st.sampled_from([1.0, 0.7]))
def test_loss_and_gradient_are_those_of_the_plain_oracle(name, seed, lengths, drift, kept) -> None:
    inputs = packed_inputs(seed, lengths, drift=drift, kept=kept)
    loss, current, _ = gradients(OBJECTIVES[name], inputs)
    for key, value in OBJECTIVES[name](inputs).metrics.items():
        assert value.ndim == 0 and not value.requires_grad, key
    expected_loss, expected = _oracle(name, inputs)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12, abs=1e-13)
    torch.testing.assert_close(current, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-14)


@every_objective
@settings(max_examples=10, deadline=None)
@given(SEEDS, LENGTHS, st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30]))
def test_what_lies_under_the_mask_is_inert_to_the_bit(name, seed, lengths, poison) -> None:
    inputs = packed_inputs(seed, lengths, kept=0.6)
    bad = poisoned(inputs, poison)
    for found, expected in zip(gradients(OBJECTIVES[name], bad), gradients(OBJECTIVES[name], inputs), strict=True):
        assert torch.equal(found, expected)
    assert not gradients(OBJECTIVES[name], bad)[1][~inputs.loss_mask].any()
    for key, value in OBJECTIVES[name](bad).metrics.items():
        assert torch.equal(value, OBJECTIVES[name](inputs).metrics[key]), key


@every_objective
@pytest.mark.parametrize("poison", [0.0, float("nan")])
def test_a_fully_masked_batch_has_loss_0_and_a_live_graph(name, poison) -> None:
    inputs = packed_inputs(1)
    inputs = poisoned(changed(inputs, loss_mask=torch.zeros_like(inputs.loss_mask)), poison)
    output = OBJECTIVES[name](inputs)
    output.loss.backward()
    assert output.loss.item() == 0
    assert inputs.current_logprobs.grad is not None
    assert not inputs.current_logprobs.grad.any()
    assert all(value == 0 for value in output.metrics.values())


@every_objective
@settings(max_examples=10, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 5), min_size=2, max_size=5), st.data())
def test_micro_batches_of_whole_rows_add_up(name, seed, lengths, data) -> None:
    inputs = packed_inputs(seed, lengths, kept=0.8)
    cut = sum(lengths[: data.draw(st.integers(1, len(lengths) - 1))])
    tokens = torch.arange(sum(lengths))
    parts = [OBJECTIVES[name](selected(inputs, part)) for part in (tokens[:cut], tokens[cut:])]
    whole = OBJECTIVES[name](inputs)
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, rtol=1e-12, atol=1e-14)
    for key, value in whole.metrics.items():
        torch.testing.assert_close(parts[0].metrics[key] + parts[1].metrics[key], value, rtol=1e-12, atol=1e-14)


@every_objective
@settings(max_examples=10, deadline=None)
@given(SEEDS, LENGTHS)
def test_an_objective_that_says_so_is_token_level(name, seed, lengths) -> None:
    objective, inputs = OBJECTIVES[name], packed_inputs(seed, lengths, kept=0.8)
    if not objective.token_level:
        assert isinstance(objective, Gspo | Tvpo)
        return
    _, whole, whole_entropy = gradients(objective, inputs)
    for at in range(len(whole)):
        _, current, entropy = gradients(objective, selected(inputs, torch.tensor([at])))
        torch.testing.assert_close((current[0], entropy[0]), (whole[at], whole_entropy[at]), rtol=1e-13, atol=0)


@every_objective
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_log_ratios_beyond_every_bound_stay_finite(name, dtype, sign) -> None:
    inputs = packed_inputs(4, (4, 4), dtype=dtype)
    far = torch.tensor([-1e4, 0.0, -1e-3, -30.0, -88.0, -89.0, -104.0, -710.0], dtype=dtype)
    inputs = changed(
        inputs,
        current_logprobs=far.clone().requires_grad_(),
        proximal_logprobs=far.flip(0),
        behavior_logprobs=far.roll(3),
        reference_logprobs=far.roll(5),
        advantages=torch.full((8,), sign, dtype=dtype),
        lag=torch.arange(8),
    )
    output = OBJECTIVES[name](inputs)
    output.loss.backward()
    assert output.loss.dtype == dtype
    assert torch.isfinite(output.loss)
    assert torch.isfinite(inputs.current_logprobs.grad).all()
    assert all(torch.isfinite(value) for value in output.metrics.values())
