"""The correction refuses invalid settings with an error that names the field."""

import math

import msgspec
import pytest

from penstock.schemas.config import CorrectionConfig, Rejection

NAN = float("nan")


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
        ({"schedule": "power", "lag_scale": 0.0}, r"lag_scale = 0.0: Expected `float` > 0"),
        ({"schedule": "exponential", "lag_decay": 1.1}, r"lag_decay = 1.1: Expected `float` <= 1"),
        ({"max_lag": -1}, r"max_lag = -1: Expected `int` >= 0"),
        ({"m2_budget": 0.0}, r"m2_budget = 0.0: Expected `float` > 0"),
        ({"off_policy_delta": -0.1}, r"off_policy_delta = -0.1: Expected `float` >= 0"),
        ({"bypass": True}, r"bypass = True with mode = 'token_truncate'.*expected mode = 'none'"),
        ({"sequence_ratio": "product"}, r"sequence_ratio = 'product' with mode = 'token_truncate'"),
        (
            {"mode": "sequence_truncate", "sequence_mask_weight": "sequence"},
            r"sequence_mask_weight = 'sequence' with mode = 'sequence_truncate'",
        ),
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
