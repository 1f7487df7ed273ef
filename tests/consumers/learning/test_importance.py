"""The correction on cases small enough to work out by hand."""

import math

import msgspec
import pytest
import torch

from padded_batches import correct
from penstock.consumers.learning.loss.importance import Correction, trust
from penstock.consumers.learning.loss.rejection import off_policy_rows_kept
from penstock.consumers.learning.loss.rows import Rows
from penstock.schemas.config import CorrectionConfig, Rejection

LN2 = math.log(2.0)
NAN = float("nan")


def _correct(log_ratios: list[list[float]], config: CorrectionConfig, lag: int = 0, **more: torch.Tensor) -> Correction:
    """Behavior logprobs of -1, every token valid."""
    behavior = torch.full((len(log_ratios), len(log_ratios[0])), -1.0, dtype=torch.float64)
    proximal = behavior + torch.tensor(log_ratios, dtype=torch.float64)
    mask = torch.ones(behavior.shape, dtype=torch.bool)
    return correct(proximal, behavior, mask, torch.full(behavior.shape, lag), config, **more)


def _weights(log_ratios: list[list[float]], config: CorrectionConfig, lag: int = 0) -> list[list[float]]:
    return [[round(w, 6) for w in row] for row in _correct(log_ratios, config, lag).weights.tolist()]


def test_a_ratio_equal_to_the_threshold_is_kept() -> None:
    assert _correct([[LN2 - 1e-12]], CorrectionConfig("token_mask", 2.0)).keep_mask.all()
    assert not _correct([[LN2 + 1e-12]], CorrectionConfig("token_mask", 2.0)).keep_mask.any()
    assert _correct([[0.0]], CorrectionConfig("token_mask", 1.0)).keep_mask.all()


def test_older_tokens_are_truncated_lower() -> None:
    config = CorrectionConfig("token_truncate", 3.0, schedule="power", lag_power=1.0)
    assert _weights([[2.0, -2.0]], config, lag=0) == [[3.0, 0.135335]]
    assert _weights([[2.0, -2.0]], config, lag=1) == [[2.0, 0.135335]]
    assert _weights([[2.0, -2.0]], config, lag=3) == [[1.5, 0.135335]]


def test_each_schedule_follows_its_formula() -> None:
    lag = torch.tensor([0, 3, 8, 15])
    power = CorrectionConfig(threshold=5.0, schedule="power", lag_power=0.5)
    assert trust(lag, power).tolist() == pytest.approx([5.0, 3.0, 1 + 4 / 3, 2.0])
    assert trust(lag, CorrectionConfig(threshold=3.0)).tolist() == [3.0, 3.0, 3.0, 3.0]


def test_the_lower_bound_of_a_mask_tightens_with_lag_and_that_of_a_truncation_stays() -> None:
    # tau(1) = 2 out of tau_0 = 4, half of it in log space; so is lo(1) = 1/2 out of 1/4.
    settings = {"threshold": 4.0, "lower": 0.25, "schedule": "power", "lag_power": math.log2(3)}
    log_ratios = [[math.log(0.3), math.log(0.45), math.log(0.55), math.log(1.9), math.log(2.1)]]
    mask, truncate = CorrectionConfig("token_mask", **settings), CorrectionConfig("token_truncate", **settings)
    assert _weights(log_ratios, mask, lag=0) == [[0.3, 0.45, 0.55, 1.9, 2.1]]
    assert _weights(log_ratios, mask, lag=1) == [[0.0, 0.0, 0.55, 1.9, 0.0]]
    assert _weights([[math.log(0.1), math.log(0.3), 3.0]], truncate, lag=0) == [[0.25, 0.3, 4.0]]
    assert _weights([[math.log(0.1), math.log(0.3), 3.0]], truncate, lag=1) == [[0.25, 0.3, 2.0]]


def test_a_sequence_is_judged_at_the_mean_lag_of_its_tokens() -> None:
    zeros = torch.zeros(1, 2)
    lag = torch.tensor([[0, 2]])  # tau(1) = 2, tau(0) = 3, tau(2) = 5/3
    config = CorrectionConfig("sequence_truncate", 3.0, schedule="power", lag_power=1.0)
    weights = correct(zeros + 5.0, zeros, torch.ones(1, 2, dtype=torch.bool), lag, config).weights
    assert weights.tolist() == [[2.0, 2.0]]


def test_geometric_and_product_ratios_differ_by_the_length() -> None:
    row = [[0.3, 0.1, 0.2]]
    assert _weights(row, CorrectionConfig("sequence_truncate", 5.0)) == [[round(math.exp(0.2), 6)] * 3]
    product = CorrectionConfig("sequence_truncate", 5.0, sequence_ratio="product")
    assert _weights(row, product) == [[round(math.exp(0.6), 6)] * 3]


def test_a_kept_sequence_weighs_by_token_or_with_a_product_by_row() -> None:
    row = [[0.3, -0.1, 0.1]]
    assert _weights(row, CorrectionConfig("sequence_mask", 1.2)) == [[1.349859, 0.904837, 1.105171]]
    by_row = CorrectionConfig("sequence_mask", 1.4, sequence_ratio="product")
    assert _weights(row, by_row) == [[1.349859] * 3]
    assert _weights(row, CorrectionConfig("sequence_mask", 1.1)) == [[0.0] * 3]


def test_off_policy_rows_need_both_drift_and_a_negative_advantage() -> None:
    behavior, advantages = torch.zeros(4), torch.tensor([-1.0, 0.0, 1.0, -1.0])
    current = torch.tensor([-0.5, -0.5, -0.5, -0.25])
    mask = torch.ones(4, dtype=torch.bool)
    kept = off_policy_rows_kept(behavior, current, mask, advantages, torch.arange(4), 0.25)
    assert kept.tolist() == [False, True, True, True]


def test_corrected_tokens_are_the_truncated_and_the_masked_ones() -> None:
    row = [[3.0, 0.0, 0.1, -4.0]]
    config = CorrectionConfig("token_truncate", 2.0, rejection=(Rejection("token_k1", 10.0, 0.01),))
    correction = _correct(row, config)
    assert correction.keep_mask.tolist() == [[True, True, True, False]]
    assert correction.corrected_mask.tolist() == [[True, False, False, True]]


def test_a_nan_that_is_not_masked_is_never_masked_away() -> None:
    everything = {
        "rejection": (Rejection("token_k1", 2.0), Rejection("seq_mean_k3", 0.1), Rejection("seq_max_k1", 5.0)),
        "off_policy_delta": 0.1,
    }
    row = torch.tensor([[NAN, NAN]], dtype=torch.float64)
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        config = CorrectionConfig(mode, 2.0, 0.5, **everything)
        correction = _correct([[NAN, 0.0]], config, advantages=row * 0 - 1, current_logprobs=row)
        assert correction.keep_mask[0, 0]
        assert correction.weights[0, 0].isnan()


def test_half_precision_is_widened_before_the_difference() -> None:
    behavior = torch.tensor([[-3.0]])
    mask, lag = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64)
    proximal = torch.tensor([[-2.9]], dtype=torch.bfloat16)
    weights = correct(proximal, behavior, mask, lag, CorrectionConfig(threshold=9.0)).weights
    assert weights.dtype == torch.float32
    assert weights.item() == pytest.approx(math.exp(proximal.float().item() + 3.0), rel=1e-6)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (2, 3)])
def test_a_batch_with_nothing_left_is_corrected_to_nothing(shape) -> None:
    config = CorrectionConfig(
        "sequence_mask",
        rejection=(Rejection("seq_max_k2", 1.0),),
        off_policy_delta=0.1,
    )
    values, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    lag = torch.zeros(shape, dtype=torch.int64)
    correction = correct(values, values, mask, lag, config, advantages=values, current_logprobs=values)
    assert torch.equal(correction.weights, torch.zeros(shape))
    assert torch.equal(correction.keep_mask, mask)
    assert torch.equal(correction.corrected_mask, mask)


def test_bypass_weighs_1() -> None:
    assert _weights([[5.0, -5.0]], CorrectionConfig("none", bypass=True), lag=9) == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("settings", "token_level"),
    [
        ({}, True),
        ({"mode": "token_mask", "rejection": (Rejection("token_k3", 1.0),)}, True),
        ({"mode": "sequence_mask"}, False),
        ({"rejection": (Rejection("seq_sum_k1", 2.0),)}, False),
        ({"off_policy_delta": 0.1}, False),
    ],
)
def test_a_configuration_knows_whether_it_needs_whole_rows(settings, token_level) -> None:
    assert CorrectionConfig(**settings).is_token_level is token_level


def test_a_veto_drops_rows_with_a_token_that_the_trainer_finds_impossible_and_no_others() -> None:
    rows = [[0.0, -9.5], [0.0, -9.0], [0.0, 12.0], [12.0, 12.0]]
    veto = CorrectionConfig("none", rejection=(Rejection("seq_max_k1", 1e4),))
    assert _correct(rows, veto).keep_mask.tolist() == [[False, False], [True, True], [True, True], [True, True]]


def test_row_statistics_read_unmasked_tokens_only_and_skip_rows_that_are_not_there() -> None:
    values = torch.tensor([-1.0, -2.0, NAN, NAN, -3.0])
    rows = Rows(torch.tensor([0, 0, 0, 2, 3]), torch.tensor([True, True, False, False, True]))
    assert rows.count.tolist() == [2, 2, 2, 0, 1]
    assert rows.sum(values).tolist() == [-3, -3, -3, 0, -3]
    assert rows.mean(values).tolist() == [-1.5, -1.5, -1.5, 0, -3]
    assert rows.max(values).tolist() == [-1, -1, -1, -math.inf, -3]


def test_a_lower_bound_left_out_is_the_inverse_of_the_upper() -> None:
    row = [[LN2 - 0.01, -LN2 + 0.01, LN2 + 0.01, -LN2 - 0.01]]
    correction = _correct(row, CorrectionConfig("none", rejection=(Rejection("token_k1", 2.0),)))
    assert correction.keep_mask.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0.99}, r"threshold = 0.99: Expected `float` >= 1"),
        ({"threshold": NAN}, r"threshold = nan: Expected `float` >= 1"),
        ({"threshold": math.inf}, r"threshold = inf: expected a finite number"),
        ({"mode": "token_clip"}, r"mode = 'token_clip': Invalid enum value"),
        ({"schedule": "linear"}, r"schedule = 'linear': Invalid enum value"),
        ({"lower": 1.5}, r"lower = 1.5: Expected `float` <= 1"),
        ({"lower": 0.0}, r"lower = 0.0: Expected `float` > 0"),
        ({"schedule": "power", "lag_power": -0.5}, r"lag_power = -0.5: Expected `float` >= 0"),
        ({"off_policy_delta": -0.1}, r"off_policy_delta = -0.1: Expected `float` >= 0"),
        ({"bypass": True}, r"bypass = True with mode = 'token_truncate'.*expected mode = 'none'"),
        ({"sequence_ratio": "product"}, r"sequence_ratio = 'product' with mode = 'token_truncate'"),
        ({"rejection": ("token_k1",)}, r"rejection = \('token_k1',\): Expected `object`, got `str`"),
    ],
)
def test_settings_out_of_range_or_at_odds_are_refused_by_name(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**settings)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, CorrectionConfig)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("seq_min_k1", 2.0), r"mode = 'seq_min_k1': Invalid enum value"),
        (("token_k2", 0.0), r"upper = 0.0: Expected `float` > 0"),
        (("token_k1", 0.5), r"upper = 0.5: token_k1 bounds a ratio, expected 1 or more"),
        (("seq_sum_k1", 2.0, 1.5), r"lower = 1.5 with seq_sum_k1: expected 1 or less"),
        (("seq_max_k1", 2.0, 0.5), r"lower = 0.5 with seq_max_k1: expected none"),
        (("seq_mean_k3", 2.0, 0.5), r"lower = 0.5: seq_mean_k3 is one-sided"),
    ],
)
def test_rejections_that_make_no_sense_are_refused_by_name(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Rejection(*arguments)
