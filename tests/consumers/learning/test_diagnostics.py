"""Mismatch diagnostics: the peers' numbers to the letter, ours against the definitions, and parts that add up."""

import functools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diagnostics_oracle import MismatchToken, of_tokens, oracle
from golden_corrections import Golden, names
from padded_batches import correct, mismatch_metrics, mismatch_sums
from penstock.consumers.learning.loss.diagnostics import PEER_PREFIX, MismatchSums
from penstock.consumers.learning.loss.importance import correct_packed
from penstock.schemas.config import CorrectionConfig


def _metrics(golden: Golden, **optional) -> dict[str, float]:
    """Returns the metrics of a golden batch with NaN and infinities under the mask."""
    return mismatch_metrics(golden.poisoned(golden.proximal), golden.poisoned(golden.behavior), golden.mask, **optional)


def test_divergences_and_weight_metrics_are_those_of_ms_swift_in_every_mode() -> None:
    for name in names("ms-swift.rollout_correction.*"):
        golden = Golden(name)
        got, expected = _metrics(golden), golden.outputs["offpolicy_metrics"]
        assert len(expected) == 13
        for key, value in expected.items():
            assert got[PEER_PREFIX + key] == pytest.approx(value, rel=1e-8, abs=1e-9), (name, key)
        for setting, result in golden.outputs["is"].items():
            mode, threshold = setting.split("@")
            config = CorrectionConfig(mode=mode, threshold=float(threshold))
            weights = correct(golden.proximal, golden.behavior, golden.mask, golden.lag, config).weights
            level = "token" if mode.startswith("token_") else "geometric"
            got = _metrics(golden, weights=golden.poisoned(weights), threshold=float(threshold), level=level)
            for key, value in result["metrics"].items():
                assert got[PEER_PREFIX + key] == pytest.approx(value, rel=1e-6, abs=1e-9), (name, setting, key)


def test_divergences_and_ratios_are_those_of_verl_two_of_them_under_names_of_their_own() -> None:
    own = {"chi2_seq": "chi2_seq_product", "k3_kl": "k3_kl_unclamped"}
    for name in names("verl.rollout_correction.*"):
        golden = Golden(name)
        got = _metrics(golden)
        for key, value in golden.outputs["offpolicy_metrics"].items():
            assert got[own.get(key, PEER_PREFIX + key)] == pytest.approx(value, rel=1e-8, abs=1e-9), (name, key)
        rho = (golden.proximal - golden.behavior).clamp(-20, 20).exp()
        token_level = {key: each["metrics"] for key, each in golden.outputs["is"].items() if "token@" in key}
        compared = {key: expected for key, expected in token_level.items() if "+" not in key}
        assert len(compared) == 2
        for setting, expected in compared.items():
            # verl's effective sample size clamps the ratios themselves.
            got = _metrics(golden, weights=golden.poisoned(rho), threshold=float(setting.split("@")[1]))
            assert got["ratio_mean"] == pytest.approx(expected["rollout_is_mean"], rel=1e-8), name
            assert got[PEER_PREFIX + "ess"] == pytest.approx(expected["rollout_is_eff_sample_size"], rel=1e-8), name
            high = expected["rollout_is_ratio_fraction_high"]
            assert got[PEER_PREFIX + "clipped_frac"] == pytest.approx(high, rel=1e-6), name
            for ours, theirs in (("ratio_max", "rollout_is_max"), ("ratio_min", "rollout_is_min")):
                if theirs in expected:
                    assert got[ours] == pytest.approx(expected[theirs], rel=1e-8), name


def _random_rows(seed: int, num_rows: int = 7) -> list[list[MismatchToken]]:
    """Rows of 1 to 9 tokens; some masked, some rejected, advantages of every sign, lags mixed within a row."""
    chance = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        first_lag, advantage = chance.choice((0, 0, 1, 2, 4, 9)), chance.choice((-1.5, 0.0, 0.7))
        row = []
        for _ in range(chance.randint(1, 9)):
            train, gap = -chance.expovariate(1.0), chance.gauss(0, chance.choice((0.1, 2.0, 30.0)))
            weight = chance.choice((0.0, min(math.exp(max(-20.0, min(20.0, gap))), 2.0), 1.3))
            lag = max(0, first_lag - chance.randint(0, 2))
            moved = chance.choice((0.0, chance.gauss(0, 0.3)))
            row.append(MismatchToken(train, train - gap, chance.random() < 0.8, weight, lag, advantage, moved))
        rows.append(row)
    return rows


def _sums(
    rows: list[list[MismatchToken]], level: str = "token", environments: tuple[int, ...] | None = None
) -> MismatchSums:
    """environments: of each row."""
    tokens = [token for row in rows for token in row]

    def column(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=dtype)

    mask = column("mask", torch.bool)
    poison = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64).repeat(len(tokens))[: len(tokens)]

    def poisoned(name: str) -> Tensor:
        return torch.where(mask, column(name), poison)

    return mismatch_sums(
        poisoned("train"),
        poisoned("rollout"),
        mask,
        torch.tensor([3 * number for number, row in enumerate(rows) for _ in row], dtype=torch.int64),
        weights=poisoned("weight"),
        corrected_mask=column("corrected", torch.bool),
        lag=column("lag", torch.int64),
        threshold=2.0,
        advantages=poisoned("advantage"),
        level=level,
        current_logprobs=torch.where(mask, column("train") + column("moved"), poison),
        environments=None
        if environments is None
        else torch.tensor(environments).repeat_interleave(torch.tensor([len(row) for row in rows])),
        num_environments=4 if environments is not None else 1,
    )


LEVELS = ("token", "geometric", "product")


def _close(got: dict[str, float], expected: dict[str, float]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-10, abs=1e-10), name


def test_each_environment_has_the_numbers_of_its_own_tokens_in_parts_merged_too() -> None:
    for seed in range(10):
        rows, environments = _random_rows(seed, 12), tuple(random.Random(seed).choices((0, 1, 3), k=12))
        parts = [_sums(rows[at], environments=environments[at]) for at in (slice(0, 5), slice(5, 12))]
        merged = parts[0].merge(parts[1])
        _close(merged.metrics(), _sums(rows).metrics())
        for number, found in enumerate(merged.by_environment()):
            own = [t for row, of in zip(rows, environments, strict=True) if of == number for t in row if t.mask]
            _close(found, of_tokens(own) if own else {})
        assert merged.by_environment()[2] == {}


@st.composite
def _splits(draw: st.DrawFn) -> tuple[list[list[MismatchToken]], list[list[list[MismatchToken]]]]:
    """Rows, and the same rows in any order dealt out to parts, some of them without a row."""
    rows = _random_rows(draw(st.integers(0, 10**6)), draw(st.integers(1, 12)))
    num_parts = draw(st.integers(1, 5))
    parts: list[list[list[MismatchToken]]] = [[] for _ in range(num_parts)]
    for row in draw(st.permutations(rows)):
        parts[draw(st.integers(0, num_parts - 1))].append(row)
    return rows, parts


def _valid(rows: list[list[MismatchToken]]) -> bool:
    return any(token.mask for row in rows for token in row)


@settings(deadline=None)
@given(_splits(), st.sampled_from(LEVELS))
def test_parts_merged_are_the_whole_at_once(split: tuple, level: str) -> None:
    rows, parts = split
    merged = functools.reduce(MismatchSums.merge, [_sums(part, level) for part in parts])
    _close(merged.metrics(), _sums(rows, level).metrics())
    if _valid(rows):
        _close(merged.metrics(), oracle(rows, 2.0, level))


VALUES, MASK = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[True, True, False]])


def test_without_a_valid_token_every_number_is_finite_and_that_of_identical_policies() -> None:
    nan = torch.full((2, 3), math.nan)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    optional = {"weights": nan, "threshold": 2.0, "lag": torch.full((2, 3), -1), "advantages": nan}
    got = mismatch_metrics(nan, nan, nothing, **optional)
    same = torch.zeros(1, 1)
    expected = mismatch_metrics(same, same, torch.ones(1, 1, dtype=torch.bool), weights=same + 1, threshold=2.0)
    by_lag = {name for name in expected if "lag" in name}
    assert got == pytest.approx({name: expected[name] for name in expected.keys() - by_lag}, abs=1e-7)
    assert mismatch_metrics(nan[:0], nan[:0], nothing[:0], weights=nan[:0], threshold=2.0) == got


def test_a_rejected_batch_keeps_no_sample() -> None:
    got = mismatch_metrics(VALUES, VALUES, MASK, weights=torch.zeros(1, 3), advantages=torch.tensor([-1.0]))
    assert got["applied_ess_fraction"] == got["weight_mean"] == 0
    assert got["ess_fraction"] == got["masked_frac"] == got["rejected_frac_negative"] == 1
    assert "rejected_frac_positive" not in got


def test_the_share_corrected_is_told_by_lag() -> None:
    train = torch.tensor([0.6, 0.6, 0.8, 0.8])  # e^0.6 is below the threshold, e^0.8 above
    mask, row_ids, lag = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 4, 4])
    corrected = correct_packed(train, torch.zeros(4), mask, lag, row_ids, CorrectionConfig("token_truncate"))
    tokens = train, torch.zeros(4), mask, row_ids, lag
    got = MismatchSums.of_packed(*tokens, corrected, threshold=2.0, advantages=torch.ones(4)).metrics()
    assert got["rollout_correction/clipped_frac"] == got["corrected_frac"] == 0.5
    assert (got["corrected_frac/lag_0-mixed"], got["corrected_frac/lag_4-7"]) == (0, 1)


def test_the_widest_gaps_stay_finite() -> None:
    train, rollout = torch.tensor([[-1e4, -1.0, -700.0]]), torch.tensor([[-1.0, -1e4, -900.0]])
    mask, weights = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 3)
    got = mismatch_metrics(train, rollout, mask, weights=weights, threshold=2.0, lag=torch.tensor([[0, 1, 50]]))
    assert all(math.isfinite(value) for value in got.values())
