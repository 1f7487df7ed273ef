"""What the plain oracle does not say of the correction: edges, what counts as corrected, types, and settings."""

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from correction_oracle import CorrectionToken, Row, oracle_correct
from padded_batches import correct
from penstock.consumers.learning.loss.importance import Correction
from penstock.schemas.config import CorrectionConfig, Rejection

LN2 = math.log(2.0)
NAN = float("nan")


def _correct(
    log_ratios: list[list[float]], config: CorrectionConfig, lag: int | list[int] = 0, **more: torch.Tensor
) -> Correction:
    """Behavior logprobs of -1, every token valid."""
    behavior = torch.full((len(log_ratios), len(log_ratios[0])), -1.0, dtype=torch.float64)
    proximal = behavior + torch.tensor(log_ratios, dtype=torch.float64)
    mask = torch.ones(behavior.shape, dtype=torch.bool)
    return correct(proximal, behavior, mask, torch.tensor(lag).expand(behavior.shape), config, **more)


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


def test_a_run_may_mask_what_is_older_than_it_wants() -> None:
    config = CorrectionConfig("none", rejection=(Rejection("token_lag", 2),))
    assert _correct([[0.0] * 4], config, lag=[0, 2, 3, 4]).keep_mask.tolist() == [[True, True, False, False]]


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
    weights = correct(proximal, behavior, mask, lag, CorrectionConfig("token_truncate", 9.0)).weights
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
    for fields, token_level in (
        ({}, True),
        ({"mode": "token_mask", "rejection": (Rejection("token_k3", 1.0),)}, True),
        ({"mode": "sequence_mask"}, False),
        ({"rejection": (Rejection("seq_sum_k1", 2.0),)}, False),
        ({"off_policy_delta": 0.1}, False),
    ):
        assert CorrectionConfig(**fields).is_token_level is token_level, fields


BEHAVIORS = st.floats(-12, 0)
LOG_RATIOS = st.one_of(st.floats(-1, 1), st.floats(-4, 4), st.floats(-60, 60), st.just(0.0))


@st.composite
def batches(draw) -> list[Row]:
    """1 to 4 rows of equal length; a row's advantage is its own, a token's lag any."""
    length, rows = draw(st.integers(1, 6)), []
    for _ in range(draw(st.integers(1, 4))):
        advantage, row = draw(st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])), []
        for _ in range(length):
            behavior = draw(BEHAVIORS)
            moved = {"proximal": behavior + draw(LOG_RATIOS), "current": behavior + draw(st.floats(-2, 2))}
            lag, valid = draw(st.integers(0, 20)), draw(st.integers(0, 3)) > 0
            row.append(CorrectionToken(behavior=behavior, advantage=advantage, lag=lag, valid=valid, **moved))
        rows.append(row)
    return rows


@st.composite
def rejections(draw) -> Rejection:
    scope = draw(st.sampled_from(["token", "seq_sum", "seq_mean", "seq_max"]))
    estimator = draw(st.sampled_from(["k1", "k2", "k3"]))
    if estimator != "k1":
        return Rejection(f"{scope}_{estimator}", draw(st.floats(0.01, 10)))
    lower = None if scope == "seq_max" else draw(st.none() | st.floats(0.05, 1))
    return Rejection(f"{scope}_k1", draw(st.floats(1, 20)), lower)


@st.composite
def configs(draw) -> CorrectionConfig:
    """Every combination that a configuration accepts."""
    mode = draw(st.sampled_from(["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]))
    chosen: dict[str, Any] = {
        "mode": mode,
        "threshold": draw(st.just(1.0) | st.floats(1, 8)),
        "lower": draw(st.none() | st.floats(0.05, 1)),
        "rejection": tuple(draw(st.lists(rejections(), max_size=2))),
        "off_policy_delta": draw(st.none() | st.floats(0, 1)),
    }
    if mode.startswith("sequence"):
        chosen["sequence_ratio"] = draw(st.sampled_from(["geometric", "product"]))
    return CorrectionConfig(**chosen)


def tensors(rows: list[Row], poison: float = 0.0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The arguments of `correct`, [B, T], with poison under the mask."""

    def column(name: str, sign: int) -> torch.Tensor:
        values = [[getattr(token, name) if token.valid else sign * poison for token in row] for row in rows]
        return torch.tensor(values, dtype=dtype)

    return {
        "proximal_logprobs": column("proximal", 1),
        "behavior_logprobs": column("behavior", -1),
        "current_logprobs": column("current", 1),
        "advantages": column("advantage", -1),
        "loss_mask": torch.tensor([[token.valid for token in row] for row in rows]),
        "lag": torch.tensor([[token.lag if token.valid else -3 for token in row] for row in rows]),
    }


many = settings(deadline=None, derandomize=True, max_examples=100)


@given(rows=batches(), config=configs(), poison=st.sampled_from([NAN, math.inf, -math.inf]))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_the_correction_agrees_with_its_definition_in_plain_python_whatever_lies_under_the_mask(
    rows, config, poison
) -> None:
    inputs = {name: t.requires_grad_(t.is_floating_point()) for name, t in tensors(rows, poison).items()}
    correction = correct(config=config, **inputs)
    assert not correction.weights.requires_grad
    judged = oracle_correct(rows, config)
    assert correction.keep_mask.tolist() == [[kept for _, kept in row] for row in judged]
    expected = torch.tensor([[weight for weight, _ in row] for row in judged], dtype=torch.float64)
    torch.testing.assert_close(correction.weights, expected, rtol=1e-11, atol=0)
    masked = inputs["loss_mask"] & ~correction.keep_mask
    assert torch.equal(correction.corrected_mask & ~correction.keep_mask, masked)


@given(rows=batches(), config=configs())
@many
def test_float32_inputs_give_float32_weights_close_to_the_exact_ones(rows, config) -> None:
    rounded = tensors(rows, dtype=torch.float32)
    exact = {name: t.double() if t.is_floating_point() else t for name, t in rounded.items()}
    found, expected = correct(config=config, **rounded), correct(config=config, **exact)
    assert found.weights.dtype == torch.float32
    # A ratio within rounding of a threshold may fall on either side of it.
    assume(torch.equal(found.keep_mask, expected.keep_mask))
    # The difference of two logprobs is rounded in float32: some 1e-6 of a log-ratio of 20, added up over 6 tokens.
    torch.testing.assert_close(found.weights, expected.weights.float(), rtol=3e-5, atol=1e-9)


REFUSED = (
    ({"threshold": 0.99}, r"threshold = 0.99: Expected `float` >= 1"),
    ({"threshold": NAN}, r"threshold = nan: Expected `float` >= 1"),
    ({"threshold": math.inf}, r"threshold = inf: expected a finite number"),
    ({"mode": "token_clip"}, r"mode = 'token_clip': Invalid enum value"),
    ({"lower": 1.5}, r"lower = 1.5: Expected `float` <= 1"),
    ({"lower": 0.0}, r"lower = 0.0: Expected `float` > 0"),
    ({"off_policy_delta": -0.1}, r"off_policy_delta = -0.1: Expected `float` >= 0"),
    ({"threshold": 3.0}, r"threshold = 3.0 without mode: expected one of weights"),
    ({"sequence_ratio": "product"}, r"sequence_ratio = 'product' without mode"),
    ({"mode": "token_truncate", "bypass": True}, r"bypass = True with mode = 'token_truncate'.*expected mode = 'none'"),
    (
        {"mode": "token_truncate", "sequence_ratio": "product"},
        r"'product' with mode = 'token_truncate'",
    ),
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
    for fields, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            CorrectionConfig(**fields)
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(fields, CorrectionConfig)
    for arguments, message in REFUSED_REJECTIONS:
        with pytest.raises(ValueError, match=message):
            Rejection(*arguments)
