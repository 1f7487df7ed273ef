"""Importance weights against the peers' own functions, and the properties every mode keeps."""

import pytest
import torch
from golden_corrections import Golden, names, per_token
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.importance import correct
from schemas.config import CorrectionConfig

MODES = ("none", "token_truncate", "token_mask")
logprobs = st.floats(-60, 0)
rows = st.lists(st.tuples(logprobs, logprobs, st.booleans(), st.integers(0, 20)), min_size=1, max_size=12)


def _weights(golden: Golden, mode: str, threshold: float) -> torch.Tensor:
    return correct(
        golden.poisoned(golden.proximal),
        golden.poisoned(golden.behavior),
        golden.mask,
        golden.lag,
        CorrectionConfig(mode=mode, threshold=threshold),
    ).weights


@pytest.mark.parametrize("name", names("ms-swift.rollout_correction.*"))
def test_token_modes_reproduce_ms_swift(name) -> None:
    golden = Golden(name)
    cases = [key for key in golden.outputs["is"] if key.startswith("token_")]
    assert cases
    for key in cases:
        mode, threshold = key.split("@")
        expected = golden.outputs["is"][key]
        correction = correct(
            golden.poisoned(golden.proximal),
            golden.poisoned(golden.behavior),
            golden.mask,
            golden.lag,
            CorrectionConfig(mode=mode, threshold=float(threshold)),
        )
        torch.testing.assert_close(correction.weights, per_token(expected["weights"]), rtol=2e-6, atol=2e-7)
        clipped = correction.metrics["num_corrected"].item() / golden.mask.sum().item()
        assert clipped == pytest.approx(expected["metrics"]["clipped_frac"], rel=1e-6)


@pytest.mark.parametrize("name", names("verl.rollout_correction.*"))
def test_truncation_reproduces_verl(name) -> None:
    golden = Golden(name)
    cases = [key for key in golden.outputs["is"] if key.startswith("token@") and "+" not in key]
    assert cases
    for key in cases:
        weights = _weights(golden, "token_truncate", float(key.split("@")[1]))
        torch.testing.assert_close(weights, per_token(golden.outputs["is"][key]["weights"]), rtol=2e-6, atol=2e-7)


def test_truncation_reproduces_trl_within_the_range_that_it_does_not_clamp() -> None:
    checked = 0
    for name in names("trl.vllm_is.*"):
        golden = Golden(name)
        expected = per_token(golden.outputs["is"]["token_truncate@None:3.0"])
        weights = _weights(golden, "token_truncate", 3.0)
        # TRL does not clamp the log-ratio: below -20 its weight goes on falling towards 0.
        inside = (golden.proximal - golden.behavior).abs() <= 20
        close = inside & golden.mask
        torch.testing.assert_close(weights[close], expected[close], rtol=2e-6, atol=2e-7)
        checked += int(close.sum())
    assert checked > 100


@given(rows=rows, mode=st.sampled_from(MODES), threshold=st.floats(1, 10))
@settings(deadline=None, derandomize=True)
def test_weights_are_finite_bounded_and_0_under_the_mask(rows, mode, threshold) -> None:
    proximal, behavior, mask, lag = _columns(rows)
    correction = correct(proximal, behavior, mask, lag, CorrectionConfig(mode=mode, threshold=threshold))
    assert torch.isfinite(correction.weights).all()
    assert (correction.weights >= 0).all()
    assert (correction.weights <= threshold * (1 + 1e-6)).all()
    assert not correction.weights[~correction.keep_mask].any()
    assert not (correction.keep_mask & ~mask).any()


@given(rows=rows, mode=st.sampled_from(MODES), poison=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
@settings(deadline=None, derandomize=True)
def test_what_lies_under_the_mask_changes_nothing(rows, mode, poison) -> None:
    proximal, behavior, mask, lag = _columns(rows)
    config = CorrectionConfig(mode=mode)
    clean = correct(proximal, behavior, mask, lag, config)
    dirty = correct(torch.where(mask, proximal, poison), torch.where(mask, behavior, -poison), mask, lag, config)
    assert torch.equal(clean.weights, dirty.weights)
    assert torch.equal(clean.keep_mask, dirty.keep_mask)
    assert clean.metrics["num_corrected"] == dirty.metrics["num_corrected"]


@given(rows=rows, mode=st.sampled_from(MODES), seed=st.integers(0, 99))
@settings(deadline=None, derandomize=True)
def test_order_padding_and_lag_change_no_weight(rows, mode, seed) -> None:
    proximal, behavior, mask, lag = _columns(rows)
    config = CorrectionConfig(mode=mode)
    expected = correct(proximal, behavior, mask, lag, config).weights
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    moved = correct(proximal[order], behavior[order], mask[order], lag[order] + 1, config).weights
    assert torch.equal(moved, expected[order])
    pad = torch.nn.functional.pad
    padded = correct(pad(proximal, (0, 3)), pad(behavior, (0, 3)), pad(mask, (0, 3)), pad(lag, (0, 3)), config).weights
    assert torch.equal(padded, pad(expected, (0, 3)))


@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_weigh_1_and_carry_no_gradient(mode) -> None:
    proximal = torch.tensor([-0.5, -3.0, -20.0], requires_grad=True)
    mask = torch.ones(3, dtype=torch.bool)
    correction = correct(proximal, proximal.detach(), mask, torch.tensor([0, 1, 4]), CorrectionConfig(mode=mode))
    assert torch.equal(correction.weights, torch.ones(3))
    assert not correction.weights.requires_grad


def test_a_ratio_equal_to_the_threshold_is_kept() -> None:
    two = torch.tensor([2.0], dtype=torch.float64).log()
    mask = torch.ones(1, dtype=torch.bool)
    correction = correct(
        two, torch.zeros(1), mask, torch.zeros(1, dtype=torch.int64), CorrectionConfig(mode="token_mask", threshold=2.0)
    )
    assert correction.keep_mask.all()
    assert correction.weights.item() == pytest.approx(2.0)


def test_half_precision_is_widened_before_the_difference() -> None:
    behavior = torch.tensor([-3.0])
    mask, lag = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    weights = correct(torch.tensor([-2.9], dtype=torch.bfloat16), behavior, mask, lag, CorrectionConfig()).weights
    assert weights.dtype == torch.float32


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one shape"):
        correct(torch.zeros(2), torch.zeros(2), torch.ones(3, dtype=torch.bool), torch.zeros(2), CorrectionConfig())


def _columns(rows: list[tuple[float, float, bool, int]]) -> tuple[torch.Tensor, ...]:
    proximal, behavior, mask, lag = zip(*rows, strict=True)
    return torch.tensor(proximal), torch.tensor(behavior), torch.tensor(mask), torch.tensor(lag)
