"""The losses and gradients of every objective against the peers' own functions."""

from typing import Any

import pytest
import torch

from golden_corrections import Golden, names, per_token
from padded_batches import correct
from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.cispo import Cispo
from penstock.consumers.learning.objectives.dapo import Dapo
from penstock.consumers.learning.objectives.decoupled_ppo import DecoupledPpo, interpolated_proximal
from penstock.consumers.learning.objectives.dppo import DppoKl, DppoTv
from penstock.consumers.learning.objectives.grpo import Grpo
from penstock.consumers.learning.objectives.gspo import Gspo
from penstock.consumers.learning.objectives.reinforce import Reinforce
from penstock.consumers.learning.objectives.sapo import Sapo
from penstock.consumers.learning.objectives.terms import PolicyObjective
from penstock.consumers.learning.objectives.tvpo import Tvpo
from penstock.schemas.config import CorrectionConfig, Rejection

NONE = CorrectionConfig("none")
ANY_WEIGHT = 1e9
SEQUENCE: dict[str, Any] = {"aggregation": "sequence"}
WIDE: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.1}


def truncate(threshold: float) -> CorrectionConfig:
    return CorrectionConfig("token_truncate", threshold=threshold)


def mask(threshold: float, lower: float | None = None) -> CorrectionConfig:
    return CorrectionConfig("token_mask", threshold=threshold, lower=lower)


def verl_bypass() -> CorrectionConfig:
    return CorrectionConfig("none", bypass=True, rejection=(Rejection("seq_mean_k3", upper=0.3),))


OPSM = CorrectionConfig("none", off_policy_delta=0.1)


def plain(objective: type[PolicyObjective], **settings: Any) -> PolicyObjective:
    """Without a dual clip, unless the peer's is given."""
    return objective(**{"dual_clip": None} | settings)


VARIANTS: dict[tuple[str, str], tuple[PolicyObjective, CorrectionConfig]] = {
    ("areal", "no_rs"): (plain(DecoupledPpo), NONE),
    ("areal", "decoupled_token_mask@5"): (plain(DecoupledPpo), mask(5.0)),
    ("areal", "decoupled_token_mask@0.8:1.25"): (plain(DecoupledPpo), mask(1.25, 0.8)),
    ("areal", "decoupled_token_clamp@2"): (plain(DecoupledPpo), truncate(2.0)),
    ("areal", "decoupled_clip_higher_dual"): (plain(DecoupledPpo, clip_high=0.28, dual_clip=3.0), mask(5.0)),
    ("areal", "gspo"): (plain(Gspo, clip_low=0.2, clip_high=0.2, aggregation="token"), NONE),
    ("areal", "decoupled_loglinear_prox"): (
        plain(DecoupledPpo, proximal="loglinear", total_weight_cap=ANY_WEIGHT),
        NONE,
    ),
    ("ms-swift", "grpo"): (plain(Grpo, **SEQUENCE), NONE),
    ("ms-swift", "dapo_clip_higher"): (plain(Dapo), NONE),
    ("ms-swift", "gspo"): (plain(Gspo), NONE),
    ("ms-swift", "gspo_wide"): (plain(Gspo, **WIDE), NONE),
    ("ms-swift", "gspo_token"): (plain(Gspo, gradient="token", **WIDE), NONE),
    ("ms-swift", "cispo"): (Cispo(clip_high=1.2 - 1), NONE),
    ("ms-swift", "sapo"): (Sapo(), NONE),
    ("ms-swift", "bnpo_delta"): (plain(Grpo, dual_clip=1.5), NONE),
    ("ms-swift", "grpo+token_truncate@2"): (plain(Grpo, **SEQUENCE), truncate(2.0)),
    ("ms-swift", "grpo+token_mask@1.25"): (plain(Grpo, **SEQUENCE), mask(1.25)),
    ("ms-swift", "dapo+sequence_mask@1.05"): (plain(Grpo), CorrectionConfig("sequence_mask", threshold=1.05)),
    ("ms-swift", "grpo+opsm@0.1"): (plain(Grpo, **SEQUENCE), OPSM),
    ("ms-swift", "dapo+opsm@0.1"): (plain(Grpo), OPSM),
    ("nemo-rl", "grpo"): (plain(Grpo), NONE),
    ("nemo-rl", "is"): (plain(Grpo), truncate(ANY_WEIGHT)),
    ("nemo-rl", "tis@2"): (plain(Grpo), truncate(2.0)),
    ("nemo-rl", "icepop@0.5:5"): (plain(Grpo), mask(5.0, 0.5)),
    ("nemo-rl", "seq-mask-tis@0.8:1.1"): (plain(Grpo), CorrectionConfig("sequence_mask", threshold=1.1, lower=0.8)),
    ("nemo-rl", "gspo"): (plain(Gspo), NONE),
    ("nemo-rl", "gspo+seq_is"): (
        plain(Gspo, clip_low=0.2, clip_high=0.2),
        CorrectionConfig("sequence_truncate", threshold=ANY_WEIGHT, sequence_ratio="product"),
    ),
    ("nemo-rl", "cispo"): (Cispo(clip_high=0.2), NONE),
    ("nemo-rl", "dapo_clip_higher_dual"): (plain(Dapo, dual_clip=3.0), NONE),
    ("open-instruct", "tvpo@0.15"): (Tvpo(bound=0.15), NONE),
    ("open-instruct", "tvpo@0.3"): (Tvpo(bound=0.3), NONE),
    ("prime-rl", "default"): (DppoTv(behavior_kl_coefficient=1e-3), NONE),
    ("slime", "ppo_clip"): (plain(Grpo, **SEQUENCE), NONE),
    ("slime", "dapo_clip_higher"): (plain(Dapo, **SEQUENCE), NONE),
    ("slime", "gspo"): (plain(Gspo), NONE),
    ("slime", "cispo"): (Cispo(clip_high=0.2, **SEQUENCE), NONE),
    ("stable-rl", "dppo_binary_tv@0.1"): (DppoTv(bound_low=0.1, bound_high=0.1), NONE),
    ("stable-rl", "dppo_binary_kl@0.02:0.05"): (DppoKl(bound_low=0.02), NONE),
    ("trl", "grpo"): (plain(Grpo, **SEQUENCE), NONE),
    ("trl", "dapo_clip_higher"): (plain(Dapo), NONE),
    ("trl", "gspo"): (plain(Gspo), NONE),
    ("trl", "gspo_wide"): (plain(Gspo, **WIDE), NONE),
    ("trl", "cispo"): (Cispo(clip_high=1.2 - 1), NONE),
    ("trl", "sapo"): (Sapo(), NONE),
    ("trl", "grpo+token_truncate"): (plain(Grpo, **SEQUENCE), truncate(3.0)),
    ("trl", "dapo+sequence_mask(default)"): (
        plain(Grpo),
        CorrectionConfig("sequence_mask", threshold=3.0, sequence_ratio="product"),
    ),
    ("trl", "grpo+opsm@0.1"): (plain(Grpo, **SEQUENCE), OPSM),
    ("verl", "ppo_clip"): (plain(Grpo, dual_clip=3.0), NONE),
    ("verl", "dapo_clip_higher"): (plain(Dapo, dual_clip=10.0), NONE),
    ("verl", "gspo"): (plain(Gspo, gradient="token"), NONE),
    ("verl", "gspo_wide"): (plain(Gspo, gradient="token", **WIDE), NONE),
    ("verl", "cispo"): (Cispo(clip_high=0.2), NONE),
    ("verl", "sapo"): (Sapo(), NONE),
    ("verl", "decoupled_token_tis"): (plain(Grpo, dual_clip=3.0), truncate(2.0)),
    ("verl", "decoupled_sequence_tis"): (
        plain(Grpo, dual_clip=3.0),
        CorrectionConfig("sequence_truncate", threshold=2.0, sequence_ratio="product"),
    ),
    ("verl", "decoupled_geo_rs_token_tis"): (
        plain(Grpo, dual_clip=3.0),
        CorrectionConfig("token_truncate", threshold=2.0, rejection=(Rejection("seq_mean_k1", upper=1.5, lower=0.6),)),
    ),
    ("verl", "bypass_ppo_clip"): (plain(Grpo, dual_clip=3.0), verl_bypass()),
    ("verl", "bypass_reinforce"): (Reinforce(ratio_cap=2.0), verl_bypass()),
}

NOT_OFFERED = {
    (
        "areal",
        "decoupled_seq_mask@0.8:1.1",
    ): "tokens of a row kept by its geometric mean weigh that mean; one peer only",
    (
        "prime-rl",
        "ipo",
    ): "DPPO's mask on both sides, whatever the advantage's sign; one peer only, and no longer its default",
    ("trl", "vespo"): "its gamma weight needs the sequence's product ratio against the behavior policy; one peer only",
    ("verl", "gmpo"): "clips each token's log-ratio by the advantage's sign before a geometric mean; one peer only",
}

CASES = ["case04_mixed_lag_in_sequence", "case09_multi_turn_holes"]


def _inputs(golden: Golden, correction: CorrectionConfig, current: torch.Tensor) -> LossInputs:
    """The rows of a golden file laid end to end, poison under the mask."""
    behavior, proximal = golden.poisoned(golden.behavior), golden.poisoned(golden.proximal)
    advantages = golden.poisoned(golden.advantages)
    # At the first step of a batch, the only one that bypass is compared at, the proximal policy is the current one.
    corrected = correct(
        current.detach() if correction.bypass else proximal,
        behavior,
        golden.mask,
        golden.lag,
        correction,
        advantages=advantages,
        current_logprobs=current,
    )
    num_rows, width = golden.mask.shape
    return LossInputs(
        current_logprobs=current.flatten(),
        proximal_logprobs=(behavior if correction.bypass else proximal).flatten(),
        behavior_logprobs=behavior.flatten(),
        importance_weights=corrected.weights.flatten(),
        advantages=advantages.flatten(),
        loss_mask=corrected.keep_mask.flatten(),
        entropy=torch.full((num_rows * width,), float("nan"), dtype=torch.float64),
        row_ids=torch.arange(num_rows).repeat_interleave(width),
        rollout_tokens=golden.mask.sum(1, keepdim=True).expand(num_rows, width).flatten().double(),
        denominator=float(golden.mask.sum()),
        num_rollouts=num_rows,
        lag=golden.lag.flatten(),
    )


@pytest.mark.parametrize("peer", sorted({peer for peer, _ in VARIANTS}))
def test_loss_and_gradient_reproduce(peer) -> None:
    for case in CASES:
        golden = Golden(f"{peer}.losses.{case}")
        for variant in (variant for of_peer, variant in VARIANTS if of_peer == peer):
            objective, correction = VARIANTS[peer, variant]
            expected = golden.outputs[variant]
            current = golden.poisoned(golden.current).requires_grad_()
            loss = objective(_inputs(golden, correction, current)).loss
            loss.backward()
            if "loss" in expected:  # some peers' value is that of another surrogate with the same gradient
                assert loss.item() == pytest.approx(expected["loss"], rel=2e-6), (case, variant)
            near = torch.isclose(current.grad, per_token(expected["grad"]), rtol=2e-6, atol=2e-7)
            assert near.all(), (case, variant)


def test_every_golden_variant_is_reproduced_or_declined_with_a_reason() -> None:
    found = {(name.split(".")[0], variant) for name in names("*.losses.*") for variant in Golden(name).outputs}
    assert found == VARIANTS.keys() | NOT_OFFERED.keys()
    assert not VARIANTS.keys() & NOT_OFFERED.keys()


CLIPPED = (
    ("verl", "ppo_clip", "actor/pg_clipfrac", "policy_clipped_frac"),
    ("verl", "ppo_clip", "actor/pg_clipfrac_lower", "policy_dual_clipped_frac"),
    ("verl", "gspo_wide", "actor/pg_clipfrac", "policy_clipped_frac"),
    ("verl", "cispo", "actor/pg_clipfrac", "policy_clipped_frac"),
    ("verl", "bypass_ppo_clip", "actor/pg_clipfrac", "policy_clipped_frac"),
    ("ms-swift", "grpo", "region_clip_mean", "policy_clipped_frac"),
    ("ms-swift", "grpo", "low_clip_mean", "policy_clipped_low_frac"),
    ("ms-swift", "grpo", "high_clip_mean", "policy_clipped_high_frac"),
    ("ms-swift", "gspo", "low_clip_mean", "policy_clipped_low_frac"),
)


def test_the_clipped_shares_reproduce() -> None:
    for case in CASES:
        for peer, variant, name, metric in CLIPPED:
            golden = Golden(f"{peer}.losses.{case}")
            objective, correction = VARIANTS[peer, variant]
            inputs = _inputs(golden, correction, golden.poisoned(golden.current))
            share = objective(inputs).metrics[metric].item() / inputs.loss_mask.sum().item()
            expected = golden.outputs[variant]["metrics"][name]
            assert share == pytest.approx(expected, rel=1e-6), (case, peer, variant, metric)


def test_the_interpolated_proximal_policy_reproduces() -> None:
    for name in names("areal.rejection_sampling.*"):
        golden = Golden(name)
        for method in ("loglinear", "linear"):
            found = interpolated_proximal(golden.behavior, golden.current, golden.lag, method)
            if method == "linear":  # AReaL adds 1e-10 to the probability before the logarithm.
                found = torch.log(found.exp() + 1e-10)
            expected = per_token(golden.outputs["prox_logp"][method])
            torch.testing.assert_close(torch.where(golden.mask, found, 0.0), expected, rtol=2e-6, atol=2e-7)
