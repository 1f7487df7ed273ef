"""Every correction in the shared data, against what the peers' own functions computed.

Inputs go in with NaN and infinities under the mask, padded and packed, with lags that a constant threshold ignores.
verl's own statistics of its weights (rollout_is_*) are not among our metrics. Not offered, and left out: dividing the
weights by the batch's mean (verl, slime), the M2 budget (AReaL), and a row's geometric mean as the weight of its kept
tokens (AReaL), whose masks are compared all the same.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from golden_corrections import Golden, mask_of, names, per_token
from padded_batches import correct
from penstock.consumers.learning.loss.importance import Correction, correct_packed
from penstock.schemas.config import CorrectionConfig, Rejection

KINDS = (
    "ms-swift.rollout_correction",
    "verl.rollout_correction",
    "trl.vllm_is",
    "areal.rejection_sampling",
    "slime.mis",
)
ELSEWHERE = {
    ("ms-swift.rollout_correction", "offpolicy_metrics"): "test_diagnostics: a measurement, no correction",
    ("verl.rollout_correction", "offpolicy_metrics"): "test_diagnostics: a measurement, no correction",
    ("areal.rejection_sampling", "prox_logp"): "test_objective_decoupled_ppo: an approximation of the proximal policy",
    ("areal.rejection_sampling", "m2po_mask"): "not offered",
}

EXACT = {"rtol": 2e-6, "atol": 2e-7}
FLOAT32 = {"rtol": 2e-5, "atol": 2e-7}


def variants(kind: str, section: str) -> Iterator[tuple[Golden, str, Any]]:
    """Every correction of a kind's section that is offered: its file, its key and what the peer computed."""
    for name in names(f"{kind}.*"):
        golden = Golden(name)
        content = golden.outputs.get(section, {})
        for key, expected in content.items() if isinstance(content, dict) else [("", content)]:
            normalizes = "batch_normalize" in key or (
                section == "mis" and (golden.params["mis_base"] | golden.params["mis"][key])["tis_batch_normalize"]
            )
            if not normalizes:
                yield golden, key, expected


def corrected(golden: Golden, config: CorrectionConfig, **changed: Tensor) -> Correction:
    """The padded correction, having seen that the valid tokens packed without padding are corrected alike."""
    inputs = {
        "proximal_logprobs": golden.poisoned(golden.proximal),
        "behavior_logprobs": golden.poisoned(golden.behavior),
        "loss_mask": golden.mask,
        "lag": torch.where(golden.mask, golden.lag, -7),
    }
    if hasattr(golden, "current"):
        inputs["current_logprobs"] = golden.poisoned(golden.current)
    if hasattr(golden, "advantages"):
        inputs["advantages"] = golden.poisoned(golden.advantages)
    inputs |= changed
    padded = correct(config=config, **inputs)
    rows = torch.arange(len(golden.mask))[:, None].expand(golden.mask.shape)
    packed = correct_packed(
        config=config,
        row_ids=rows[golden.mask],
        **{name: values[golden.mask] for name, values in inputs.items()},
    )
    torch.testing.assert_close(padded.weights[golden.mask], packed.weights, rtol=1e-12, atol=0)
    assert torch.equal(padded.keep_mask[golden.mask], packed.keep_mask)
    assert torch.equal(padded.corrected_mask[golden.mask], packed.corrected_mask)
    assert not padded.weights[~golden.mask].any()
    assert not padded.keep_mask[~golden.mask].any()
    return padded


def _bounds(text: str) -> tuple[float | None, float]:
    lower, upper = text.split(":")
    return None if lower == "None" else float(lower), float(upper)


def _check_ms_swift(golden: Golden, key: str, expected: Any) -> None:
    mode, threshold = key.split("@")
    correction = corrected(golden, CorrectionConfig(mode=mode, threshold=float(threshold)))
    by_row = key.startswith("sequence_truncate")
    weights = golden.per_row(expected["weights"]) if by_row else per_token(expected["weights"])
    torch.testing.assert_close(correction.weights, weights, **EXACT)
    count = golden.mask.sum().item()
    assert correction.weights.sum().item() / count == pytest.approx(expected["metrics"]["is_weight_mean"], rel=1e-6)
    if key.startswith("token"):
        clipped = correction.corrected_mask.sum().item() / count
        assert clipped == pytest.approx(expected["metrics"]["clipped_frac"], rel=1e-6)
    if "mask" in key:
        assert torch.equal(correction.keep_mask, weights != 0)


def _check_verl(golden: Golden, key: str, expected: Any) -> None:
    level, threshold = key.split("@")
    ratio, read = ("product", golden.per_row) if level == "sequence" else ("geometric", per_token)
    config = CorrectionConfig(mode=f"{level}_truncate", threshold=float(threshold), sequence_ratio=ratio)
    correction = corrected(golden, config)
    assert torch.equal(correction.keep_mask, golden.mask)
    torch.testing.assert_close(correction.weights, read(expected["weights"]), **EXACT)


def _verl_rejection(key: str) -> CorrectionConfig:
    modes, thresholds = key.split("@")
    rejections = []
    for mode, threshold in zip(modes.split(","), thresholds.split(","), strict=True):
        lower, _, upper = threshold.rpartition("_")
        rejections.append(Rejection(mode, float(upper), float(lower) if lower else None))
    return CorrectionConfig(mode="none", rejection=tuple(rejections))


def _check_verl_rejection(golden: Golden, key: str, expected: Any) -> None:
    correction = corrected(golden, _verl_rejection(key))
    assert torch.equal(correction.keep_mask, mask_of(expected["mask"]))
    assert torch.equal(correction.weights, correction.keep_mask.double())
    lost = golden.mask & ~correction.keep_mask
    assert (lost.sum() / golden.mask.sum()).item() == pytest.approx(expected["masked_fraction"])
    assert lost.any(1).double().mean() == pytest.approx(expected["seq_masked_fraction"])


def _check_trl(golden: Golden, key: str, expected: Any) -> None:
    mode, bounds = key.split("@")
    lower, upper = _bounds(bounds)
    ratio, read = ("product", golden.per_row) if mode.startswith("sequence") else ("geometric", per_token)
    correction = corrected(golden, CorrectionConfig(mode, upper, lower, sequence_ratio=ratio))
    weights = read(expected)
    torch.testing.assert_close(correction.weights, weights, **EXACT)
    if "mask" in key:
        assert torch.equal(correction.keep_mask, weights != 0)


def _areal(key: str) -> CorrectionConfig:
    variant, bounds = key.split("@")
    level, action, metric, *aggregation = variant.split("/")
    lower, upper = _bounds(bounds)
    if metric.startswith("kl_"):
        prefix = f"seq_{aggregation[0]}" if aggregation else "token"
        return CorrectionConfig(mode="none", rejection=(Rejection(f"{prefix}_{metric[3:]}", upper),))
    return CorrectionConfig(
        mode=f"{level}_{ {'mask': 'mask', 'clamp': 'truncate'}[action] }",
        threshold=upper,
        lower=lower,
        sequence_ratio="product" if aggregation == ["sum"] else "geometric",
    )


def _check_areal(golden: Golden, key: str, expected: Any) -> None:
    config = _areal(key)
    correction = corrected(golden, config)
    assert torch.equal(correction.keep_mask, mask_of(expected["mask"]))
    filtered = correction.corrected_mask.sum().item() / golden.mask.sum().item()
    assert filtered == pytest.approx(expected["filtered_fraction"])
    # A row kept by its geometric mean: AReaL gives its tokens that mean as weight, here they have their own ratios.
    is_other = key.startswith("sequence/mask/") and config.sequence_ratio == "geometric"
    if "behave_imp_weight" in expected and not is_other:
        torch.testing.assert_close(correction.weights, per_token(expected["behave_imp_weight"]), **FLOAT32)


def _slime(golden: Golden, key: str) -> CorrectionConfig:
    settings = golden.params["mis_base"] | golden.params["mis"][key]
    lower, upper = settings["tis_lower_bound"], settings["tis_upper_bound"]
    action, level = settings["tis_mode"], settings["tis_level"]
    rejection: tuple[Rejection, ...] = ()
    if settings["use_rs"]:
        low, high = settings.get("rs_lower_bound", lower), settings.get("rs_upper_bound", upper)
        # Its bounds are of proximal / behavior, those of k1 of the inverse.
        mode = {"token": "token_k1", "geometric": "seq_mean_k1"}[settings["rs_level"]]
        rejection = (Rejection(mode, upper=1 / low, lower=1 / high),)
        if settings["rs_veto_threshold"] is not None:
            rejection += (Rejection("seq_max_k1", upper=1 / settings["rs_veto_threshold"]),)
    return CorrectionConfig(
        mode=f"{'token' if level == 'token' else 'sequence'}_{'mask' if action == 'mask' else 'truncate'}",
        threshold=upper,
        lower=None if action == "truncate" else lower,
        sequence_ratio="product" if level == "sequence" else "geometric",
        rejection=rejection,
    )


def _check_slime(golden: Golden, key: str, expected: Any) -> None:
    correction = corrected(golden, _slime(golden, key))
    keep = mask_of(expected["mask"])
    assert torch.equal(correction.keep_mask, keep)
    # slime hands out weights of tokens that its mask then drops.
    weights = torch.where(keep, per_token(expected["weights"]), 0.0)
    torch.testing.assert_close(correction.weights, weights, **EXACT)


def _check_slime_tis(golden: Golden, key: str, expected: Any) -> None:
    settings = golden.params["vanilla_tis"]
    assert settings["tis_clip_low"] == 0
    config = CorrectionConfig(mode="token_truncate", threshold=settings["tis_clip"])
    torch.testing.assert_close(corrected(golden, config).weights, per_token(expected), **EXACT)


def _check_icepop(golden: Golden, key: str, expected: Any) -> None:
    settings = golden.params["icepop"]
    config = CorrectionConfig(mode="token_mask", threshold=settings["tis_clip"], lower=settings["tis_clip_low"])
    correction = corrected(golden, config)
    torch.testing.assert_close(correction.weights, per_token(expected), **EXACT)
    assert torch.equal(correction.keep_mask, per_token(expected) != 0)


def _check_off_policy(golden: Golden, key: str, expected: Any) -> None:
    keep = mask_of(expected) & golden.mask if isinstance(expected[0], str) else golden.per_row(expected) == 1
    correction = corrected(golden, CorrectionConfig(mode="none", off_policy_delta=float(key)))
    assert torch.equal(correction.keep_mask, keep)


CHECKS: dict[tuple[str, str], Callable[[Golden, str, Any], None]] = {
    ("ms-swift.rollout_correction", "is"): _check_ms_swift,
    ("ms-swift.rollout_correction", "opsm_keep"): _check_off_policy,
    ("verl.rollout_correction", "is"): _check_verl,
    ("verl.rollout_correction", "rs"): _check_verl_rejection,
    ("trl.vllm_is", "is"): _check_trl,
    ("trl.vllm_is", "off_policy_mask"): _check_off_policy,
    ("areal.rejection_sampling", "rejection_sampling"): _check_areal,
    ("slime.mis", "mis"): _check_slime,
    ("slime.mis", "vanilla_tis"): _check_slime_tis,
    ("slime.mis", "icepop"): _check_icepop,
    ("slime.mis", "opsm"): _check_off_policy,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_peers_corrections_are_reproduced(kind) -> None:
    num_checked = 0
    for section in (section for of_kind, section in CHECKS if of_kind == kind):
        for golden, key, expected in variants(kind, section):
            print(golden.name, section, key)  # shown with a failure
            CHECKS[kind, section](golden, key, expected)
            num_checked += 1
    assert num_checked >= 13


def test_every_section_of_every_file_is_checked_here_or_elsewhere() -> None:
    sections = {(kind, section) for kind in KINDS for name in names(f"{kind}.*") for section in Golden(name).outputs}
    assert sections == set(CHECKS) | set(ELSEWHERE)
