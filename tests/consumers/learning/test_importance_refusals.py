"""The correction refuses invalid settings and inputs with an error that names the field or the argument."""

import math

import msgspec
import pytest
import torch

from penstock.consumers.learning.importance import correct_packed, trust
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


GOOD = {
    "proximal_logprobs": torch.zeros(6),
    "behavior_logprobs": torch.zeros(6),
    "loss_mask": torch.ones(6, dtype=torch.bool),
    "lag": torch.zeros(6, dtype=torch.int64),
    "row_ids": torch.tensor([0, 0, 0, 1, 1, 1]),
    "advantages": torch.zeros(6),
    "current_logprobs": torch.zeros(6),
}


@pytest.mark.parametrize("name", ["behavior_logprobs", "loss_mask", "lag", "advantages", "current_logprobs"])
def test_a_tensor_of_another_shape_is_refused_by_name(name) -> None:
    arguments = GOOD | {name: GOOD[name][:4]}
    with pytest.raises(ValueError, match=rf"{name} has shape \[4\], expected that of proximal_logprobs, \[6\]"):
        correct_packed(config=CorrectionConfig(), **arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask": torch.ones(6)}, r"loss_mask is torch.float32, expected torch.bool"),
        ({"lag": torch.zeros(6)}, r"lag is torch.float32, expected an integer type"),
        ({"lag": torch.tensor([0, 1, 2, 0, -1, 2])}, r"lag holds -1, expected 0 or more"),
    ],
)
def test_tensors_that_cannot_be_meant_are_refused_by_name(changed, message) -> None:
    with pytest.raises(ValueError, match=message):
        correct_packed(config=CorrectionConfig(), **(GOOD | changed))


@pytest.mark.parametrize(
    ("row_ids", "message"),
    [
        (torch.tensor([0, 1, 0, 1, 1, 1]), r"row_ids: expected ascending"),
        (torch.tensor([-1, 0, 0, 1, 1, 1]), r"row_ids: expected ascending rows from 0"),
        (torch.zeros(5, dtype=torch.int64), r"row_ids has shape \[5\] and loss_mask \[6\]"),
        (torch.zeros(6), r"row_ids is torch.float32, expected torch.int64"),
    ],
)
def test_rows_out_of_order_are_refused(row_ids, message) -> None:
    with pytest.raises(ValueError, match=message):
        correct_packed(config=CorrectionConfig(), **(GOOD | {"row_ids": row_ids}))


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"schedule": "sign_aware"}, "advantages"),
        ({"off_policy_delta": 0.1}, "advantages"),
        ({"off_policy_delta": 0.1}, "current_logprobs"),
    ],
)
def test_a_tensor_that_the_configuration_needs_is_asked_for_by_name(settings, missing) -> None:
    arguments = {name: values for name, values in GOOD.items() if name != missing}
    with pytest.raises(ValueError, match=f"{missing} is None, expected a tensor: .*{next(iter(settings))}"):
        correct_packed(config=CorrectionConfig(**settings), **arguments)


def test_trust_in_a_negative_lag_is_refused() -> None:
    with pytest.raises(ValueError, match="lag holds -2, expected 0 or more"):
        trust(torch.tensor([1, -2]), CorrectionConfig())


def test_a_schedule_named_after_the_bound_is_refused_without_one() -> None:
    with pytest.raises(ValueError, match=r"config\.max_lag is None, expected the largest lag to keep"):
        correct_packed(config=CorrectionConfig(schedule="max_lag"), **GOOD)


@pytest.mark.parametrize("name", ["proximal_logprobs", "behavior_logprobs", "advantages"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_tensors_that_hold_no_logprobs_are_named(name, dtype) -> None:
    zeros = torch.zeros(6)
    given = {"proximal_logprobs": zeros, "behavior_logprobs": zeros, "advantages": zeros}
    given[name] = zeros.to(dtype)
    with pytest.raises(ValueError, match=f"{name} is {dtype}, expected a float type"):
        correct_packed(config=CorrectionConfig(), **(GOOD | given))
