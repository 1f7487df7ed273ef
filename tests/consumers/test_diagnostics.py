"""Divergences and effective sample size of a batch."""

import pytest
import torch
from golden_corrections import Golden, names

from consumers.diagnostics import diagnose
from consumers.importance import correct
from schemas.config import CorrectionConfig


def _diagnose(golden: Golden, mode: str = "token_truncate", threshold: float = 2.0) -> dict[str, float]:
    proximal, behavior = golden.poisoned(golden.proximal), golden.poisoned(golden.behavior)
    config = CorrectionConfig(mode=mode, threshold=threshold)
    weights = correct(proximal, behavior, golden.mask, golden.lag, config).weights
    return diagnose(proximal, behavior, weights, golden.mask, threshold)


@pytest.mark.parametrize("name", names("ms-swift.rollout_correction.*"))
def test_divergences_reproduce_ms_swift(name) -> None:
    golden = Golden(name)
    expected = golden.outputs["offpolicy_metrics"]
    got = _diagnose(golden)
    assert got["kl"] == pytest.approx(expected["kl"], rel=1e-6, abs=1e-9)
    assert got["k3_kl"] == pytest.approx(expected["k3_kl"], rel=1e-6, abs=1e-9)
    assert got["chi2"] == pytest.approx(expected["chi2_token"], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", names("ms-swift.rollout_correction.*"))
def test_weight_mean_and_clipped_fraction_reproduce_ms_swift(name) -> None:
    golden = Golden(name)
    for key, expected in golden.outputs["is"].items():
        mode, threshold = key.split("@")
        if not mode.startswith("token_"):
            continue
        got = _diagnose(golden, mode, float(threshold))
        assert got["weight_mean"] == pytest.approx(expected["metrics"]["is_weight_mean"], rel=1e-6)
        assert got["clipped_frac"] == pytest.approx(expected["metrics"]["clipped_frac"], rel=1e-6)


def test_identical_policies_have_no_divergence_and_the_full_sample() -> None:
    values, mask = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([True, True, False])
    got = diagnose(values, values, torch.where(mask, 1.0, 0.0), mask, 2.0)
    assert got["kl"] == got["k3_kl"] == got["chi2"] == got["clipped_frac"] == 0
    assert got["ess_fraction"] == got["applied_ess_fraction"] == got["weight_mean"] == 1


def test_ess_shows_a_collapse_that_truncated_weights_hide() -> None:
    behavior = torch.full((100,), -1.0)
    proximal = behavior.clone()
    proximal[0] += 10.0
    mask = torch.ones(100, dtype=torch.bool)
    weights = correct(proximal, behavior, mask, torch.zeros(100, dtype=torch.int64), CorrectionConfig()).weights
    got = diagnose(proximal, behavior, weights, mask, 2.0)
    rho = (proximal - behavior).double().exp()
    assert got["ess_fraction"] == pytest.approx((rho.sum() ** 2 / (100 * (rho**2).sum())).item())
    assert got["ess_fraction"] < 0.02
    assert got["applied_ess_fraction"] > 0.9


def test_without_a_valid_token_everything_is_finite() -> None:
    nan = torch.full((3,), float("nan"))
    got = diagnose(nan, nan, torch.zeros(3), torch.zeros(3, dtype=torch.bool), 2.0)
    assert got["kl"] == got["chi2"] == got["weight_mean"] == 0
    assert got["ess_fraction"] == 1
