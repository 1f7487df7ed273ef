"""What the plain oracle does not say of the correction: edges, what counts as corrected, types, and settings."""

import math

import msgspec
import pytest
import torch

from padded_batches import correct
from penstock.consumers.learning.loss.importance import Correction
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


def test_a_ratio_equal_to_the_threshold_is_kept() -> None:
    assert _correct([[LN2 - 1e-12]], CorrectionConfig("token_mask", 2.0)).keep_mask.all()
    assert not _correct([[LN2 + 1e-12]], CorrectionConfig("token_mask", 2.0)).keep_mask.any()
    assert _correct([[0.0]], CorrectionConfig("token_mask", 1.0)).keep_mask.all()


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


def test_a_batch_with_nothing_left_is_corrected_to_nothing() -> None:
    config = CorrectionConfig("sequence_mask", rejection=(Rejection("seq_max_k2", 1.0),), off_policy_delta=0.1)
    for shape in ((0, 0), (2, 0), (2, 3)):
        values, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
        lag = torch.zeros(shape, dtype=torch.int64)
        correction = correct(values, values, mask, lag, config, advantages=values, current_logprobs=values)
        assert torch.equal(correction.weights, torch.zeros(shape)), shape
        assert torch.equal(correction.keep_mask, mask) and torch.equal(correction.corrected_mask, mask), shape


def test_a_configuration_knows_whether_it_needs_whole_rows() -> None:
    for settings, token_level in (
        ({}, True),
        ({"mode": "token_mask", "rejection": (Rejection("token_k3", 1.0),)}, True),
        ({"mode": "sequence_mask"}, False),
        ({"rejection": (Rejection("seq_sum_k1", 2.0),)}, False),
        ({"off_policy_delta": 0.1}, False),
    ):
        assert CorrectionConfig(**settings).is_token_level is token_level, settings


def test_row_statistics_read_unmasked_tokens_only_and_skip_rows_that_are_not_there() -> None:
    values = torch.tensor([-1.0, -2.0, NAN, NAN, -3.0])
    rows = Rows(torch.tensor([0, 0, 0, 2, 3]), torch.tensor([True, True, False, False, True]))
    assert rows.count.tolist() == [2, 2, 2, 0, 1]
    assert rows.sum(values).tolist() == [-3, -3, -3, 0, -3]
    assert rows.mean(values).tolist() == [-1.5, -1.5, -1.5, 0, -3]
    assert rows.max(values).tolist() == [-1, -1, -1, -math.inf, -3]


REFUSED = (
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
)
REFUSED_REJECTIONS = (
    (("seq_min_k1", 2.0), r"mode = 'seq_min_k1': Invalid enum value"),
    (("token_k2", 0.0), r"upper = 0.0: Expected `float` > 0"),
    (("token_k1", 0.5), r"upper = 0.5: token_k1 bounds a ratio, expected 1 or more"),
    (("seq_sum_k1", 2.0, 1.5), r"lower = 1.5 with seq_sum_k1: expected 1 or less"),
    (("seq_max_k1", 2.0, 0.5), r"lower = 0.5 with seq_max_k1: expected none"),
    (("seq_mean_k3", 2.0, 0.5), r"lower = 0.5: seq_mean_k3 is one-sided"),
)


def test_settings_out_of_range_or_at_odds_are_refused_by_name() -> None:
    for settings, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            CorrectionConfig(**settings)
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(settings, CorrectionConfig)
    for arguments, message in REFUSED_REJECTIONS:
        with pytest.raises(ValueError, match=message):
            Rejection(*arguments)
