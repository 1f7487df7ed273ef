"""The correction's properties hold for random configurations; it agrees with an oracle in plain Python."""

from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from correction_oracle import CorrectionToken, Row, oracle_correct
from padded_batches import correct
from penstock.consumers.learning.loss.importance import Correction, correct_packed
from penstock.schemas.config import CorrectionConfig, Rejection

NAN, INF = float("nan"), float("inf")

behaviors = st.floats(-12, 0)
log_ratios = st.one_of(st.floats(-1, 1), st.floats(-4, 4), st.floats(-60, 60), st.just(0.0))
lags = st.integers(0, 20)
advantages = st.sampled_from([-1.5, -0.25, 0.0, 0.5, 2.0])


@st.composite
def batches(draw) -> list[Row]:
    """1 to 4 rows of equal length; a row's advantage is its own, a token's lag any."""
    length = draw(st.integers(1, 6))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        advantage = draw(advantages)
        row = []
        for _ in range(length):
            behavior = draw(behaviors)
            row.append(
                CorrectionToken(
                    proximal=behavior + draw(log_ratios),
                    behavior=behavior,
                    current=behavior + draw(st.floats(-2, 2)),
                    advantage=advantage,
                    lag=draw(lags),
                    valid=draw(st.integers(0, 3)) > 0,
                )
            )
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
def configs(draw, *, masks_beside: bool = True) -> CorrectionConfig:
    """Every combination that a configuration accepts."""
    mode = draw(st.sampled_from(["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]))
    chosen: dict[str, Any] = {
        "mode": mode,
        "threshold": draw(st.just(1.0) | st.floats(1, 8)),
        "lower": draw(st.none() | st.floats(0.05, 1)),
        "schedule": draw(st.sampled_from(["const", "power"])),
        "lag_power": draw(st.floats(0, 3)),
    }
    if mode.startswith("sequence"):
        chosen["sequence_ratio"] = draw(st.sampled_from(["geometric", "product"]))
    if masks_beside:
        chosen["rejection"] = tuple(draw(st.lists(rejections(), max_size=2)))
        chosen["off_policy_delta"] = draw(st.none() | st.floats(0, 1))
    return CorrectionConfig(**chosen)


def tensors(rows: list[Row]) -> dict[str, torch.Tensor]:
    """The arguments of `correct`, [B, T]."""

    def column(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor([[getattr(token, name) for token in row] for row in rows], dtype=dtype)

    return {
        "proximal_logprobs": column("proximal"),
        "behavior_logprobs": column("behavior"),
        "current_logprobs": column("current"),
        "advantages": column("advantage"),
        "loss_mask": column("valid", torch.bool),
        "lag": column("lag", torch.int64),
    }


def assert_same(found: Correction, expected: Correction) -> None:
    """Equal up to the order in which a row or the batch was added up."""
    assert torch.equal(found.keep_mask, expected.keep_mask)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-12, atol=0)
    assert torch.equal(found.corrected_mask, expected.corrected_mask)


def cut(correction: Correction, *index: Any) -> Correction:
    """Its tokens at `index`."""
    parts = (correction.weights, correction.keep_mask, correction.corrected_mask)
    return Correction(*(part[index] for part in parts))


many = settings(deadline=None, derandomize=True, max_examples=100)
more = settings(deadline=None, derandomize=True, max_examples=400)


@given(rows=batches(), config=configs())
@more
def test_the_correction_agrees_with_its_definition_in_plain_python(rows, config) -> None:
    inputs = {name: t.requires_grad_(t.is_floating_point()) for name, t in tensors(rows).items()}
    correction = correct(config=config, **inputs)
    assert not correction.weights.requires_grad
    judged = oracle_correct(rows, config)
    assert correction.keep_mask.tolist() == [[kept for _, kept in row] for row in judged]
    expected = torch.tensor([[weight for weight, _ in row] for row in judged], dtype=torch.float64)
    torch.testing.assert_close(correction.weights, expected, rtol=1e-11, atol=0)
    masked = [
        [token.valid and not kept for token, (_, kept) in zip(*each, strict=True)]
        for each in zip(rows, judged, strict=True)
    ]
    assert (correction.corrected_mask & ~correction.keep_mask).tolist() == masked


@given(rows=batches(), config=configs(), later=st.integers(1, 10))
@many
def test_no_weight_grows_with_lag(rows, config, later) -> None:
    fresh = tensors(rows)
    stale = fresh | {"lag": fresh["lag"] + later}
    before, after = correct(config=config, **fresh), correct(config=config, **stale)
    assert (after.weights <= before.weights).all()
    assert not (after.keep_mask & ~before.keep_mask).any()


@given(rows=batches(), config=configs(), poison=st.sampled_from([NAN, INF, -INF]))
@many
def test_what_lies_under_the_mask_changes_nothing(rows, config, poison) -> None:
    clean = tensors(rows)
    dirty = dict(clean)
    for sign, name in (
        (1, "proximal_logprobs"),
        (-1, "behavior_logprobs"),
        (1, "current_logprobs"),
        (-1, "advantages"),
    ):
        dirty[name] = torch.where(clean["loss_mask"], clean[name], sign * poison)
    dirty["lag"] = torch.where(clean["loss_mask"], clean["lag"], -3)
    found, expected = correct(config=config, **dirty), correct(config=config, **clean)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.keep_mask, expected.keep_mask)


@given(rows=batches(), config=configs())
@many
def test_packed_tokens_are_corrected_as_padded_ones(rows, config) -> None:
    inputs = tensors(rows)
    mask = inputs["loss_mask"]
    row_ids = torch.arange(len(rows))[:, None].expand(mask.shape)[mask]
    packed = correct_packed(config=config, row_ids=row_ids, **{name: t[mask] for name, t in inputs.items()})
    padded = correct(config=config, **inputs)
    assert_same(packed, cut(padded, mask))


@given(rows=batches(), config=configs())
@many
def test_a_token_level_configuration_corrects_each_token_as_if_it_were_alone(rows, config) -> None:
    assume(config.is_token_level)
    together = correct(config=config, **tensors(rows))
    alone = correct(config=config, **tensors([[token] for row in rows for token in row]))
    assert torch.equal(alone.weights.view(together.weights.shape), together.weights)
    assert torch.equal(alone.keep_mask.view(together.keep_mask.shape), together.keep_mask)


@given(rows=batches(), config=configs())
@many
def test_float32_inputs_give_float32_weights_close_to_the_exact_ones(rows, config) -> None:
    rounded = {name: t.float() if t.is_floating_point() else t for name, t in tensors(rows).items()}
    exact = {name: t.double() if t.is_floating_point() else t for name, t in rounded.items()}
    found, expected = correct(config=config, **rounded), correct(config=config, **exact)
    assert found.weights.dtype == torch.float32
    # A ratio within rounding of a threshold may fall on either side of it.
    assume(torch.equal(found.keep_mask, expected.keep_mask))
    # The difference of two logprobs is rounded in float32: some 1e-6 of a log-ratio of 20, added up over 6 tokens.
    torch.testing.assert_close(found.weights, expected.weights.float(), rtol=3e-5, atol=1e-9)
