"""The objectives share aggregation, the KL to a reference, the entropy bonus, arguments and attributes."""

import inspect
from typing import Any

import pytest
import torch

from objective_cases import OBJECTIVES, changed, gradients, packed_inputs
from penstock.consumers.learning.interfaces import Objective, settled_correction
from penstock.consumers.learning.objectives.cispo import Cispo
from penstock.consumers.learning.objectives.dapo import Dapo
from penstock.consumers.learning.objectives.decoupled_ppo import DecoupledPpo
from penstock.consumers.learning.objectives.dppo import DppoKl, DppoTv
from penstock.consumers.learning.objectives.grpo import Grpo
from penstock.consumers.learning.objectives.gspo import Gspo
from penstock.consumers.learning.objectives.reinforce import Reinforce
from penstock.consumers.learning.objectives.sapo import Sapo
from penstock.consumers.learning.objectives.terms import reference_kl
from penstock.consumers.learning.objectives.tvpo import Tvpo
from penstock.schemas.config import CorrectionConfig, Plug
from penstock.schemas.process.plugins import construct
from training_groups import configuration

SIDES = ("bound_low", "bound_high")
EVERY_CLASS = [Grpo, Dapo, Gspo, Cispo, Reinforce, DecoupledPpo, Sapo, DppoTv, DppoKl, Tvpo]
TRUSTED: dict[type, tuple[str, ...]] = {DppoTv: SIDES, DppoKl: SIDES, Tvpo: ("bound",)}
"""Those whose trust region is around the behavior policy, and its bounds."""


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("kind", [Grpo, DppoTv])
def test_a_weighted_kl_has_the_gradient_of_the_current_policys_whoever_sampled_the_tokens(kind, estimator) -> None:
    generator = torch.Generator().manual_seed(5)
    theta = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference, proximal, behavior = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(1)
    log_p = theta.log_softmax(0)
    expected = torch.autograd.grad((log_p.exp() * (log_p - reference)).sum(), theta, retain_graph=True)[0]
    current = log_p.detach().requires_grad_()
    inputs = changed(
        packed_inputs(0, (6,)),
        current_logprobs=current,
        proximal_logprobs=proximal,
        behavior_logprobs=behavior,
        importance_weights=torch.ones_like(proximal) if kind in TRUSTED else (proximal - behavior).exp(),
        advantages=torch.zeros(6, dtype=torch.float64),
        reference_logprobs=reference,
        denominator=1.0,
    )

    def gradient(**arguments: Any) -> torch.Tensor:
        loss = kind(kl_coefficient=1.0, kl_estimator=estimator, **arguments)(inputs).loss
        by_logprob = torch.autograd.grad(loss, current)[0]
        return torch.autograd.grad((behavior.exp() * by_logprob * log_p).sum(), theta, retain_graph=True)[0]

    torch.testing.assert_close(gradient(kl_importance_weighted=True), expected)
    assert (gradient() - expected).abs().max() > 0.05


def test_k3_keeps_its_accuracy_where_the_policies_hardly_differ() -> None:
    current = torch.tensor([-1.0], dtype=torch.float32)
    found = reference_kl(current, current + 1e-3, "k3").item()
    x = (current + 1e-3).item() - current.item()
    assert found == pytest.approx(x**2 / 2 + x**3 / 6, rel=1e-3)


def test_the_reference_kl_is_reported_even_where_it_is_not_part_of_the_loss() -> None:
    inputs = packed_inputs(3)
    reported = Grpo()(inputs).metrics["reference_kl"]
    expected = reference_kl(inputs.current_logprobs.detach(), inputs.reference_logprobs, "k3").sum()
    torch.testing.assert_close(reported, expected)
    without = Grpo()(changed(inputs, reference_logprobs=None))
    assert "reference_kl" not in without.metrics
    assert torch.equal(without.loss, Grpo()(inputs).loss)


def test_a_term_without_what_it_needs_is_refused() -> None:
    for kind in EVERY_CLASS:
        with pytest.raises(ValueError, match=f"{kind.__name__}: reference_logprobs is None with kl_coefficient = 0.1"):
            kind(kl_coefficient=0.1)(changed(packed_inputs(0), reference_logprobs=None))
    with pytest.raises(ValueError, match="DecoupledPpo: lag is None with proximal = 'linear'"):
        DecoupledPpo(proximal="linear", total_weight_cap=2.0)(changed(packed_inputs(0), lag=None))


def test_without_the_cap_the_clip_would_let_the_total_weight_grow_with_lag() -> None:
    one = torch.ones(1, dtype=torch.float64)
    inputs = changed(
        packed_inputs(0, (1,)),
        current_logprobs=(-1 * one).requires_grad_(),
        behavior_logprobs=-1 - 16 * torch.log(1.199 * one),
        advantages=one,
        importance_weights=one,
        lag=torch.tensor([16]),
    )
    for cap, weight, capped in ((1e9, 1.199**16, 0), (5.0, 5.0, 1)):
        objective = DecoupledPpo(proximal="loglinear", total_weight_cap=cap)
        assert -inputs.denominator * gradients(objective, inputs)[1].item() == pytest.approx(weight, rel=1e-9)
        assert objective(inputs).metrics["total_weight_capped_frac"] == capped


def test_the_entropy_bonus_reaches_the_entropys_gradient_alone() -> None:
    inputs = packed_inputs(0)
    for kind in EVERY_CLASS:
        _, plain, nothing = gradients(kind(aggregation="token"), inputs)
        _, current, entropy = gradients(kind(aggregation="token", entropy_coefficient=0.5), inputs)
        torch.testing.assert_close(entropy, torch.full_like(entropy, -0.5 / inputs.denominator))
        assert torch.equal(current, plain) and not nothing.any(), kind


def test_what_the_trainer_reads_off_an_objective() -> None:
    attributes = {
        kind.__name__: (kind().token_level, kind().needs_reference, getattr(kind(), "reads_behavior", False))
        for kind in EVERY_CLASS
    }
    of_sampler = {kind.__name__ for kind in TRUSTED}
    assert attributes == {name: (name not in ("Gspo", "Tvpo"), False, name in of_sampler) for name in attributes}
    assert DecoupledPpo(proximal="linear", total_weight_cap=2.0).reads_behavior
    for kind in EVERY_CLASS:
        assert not kind().trains_every_row
        for term in ("kl_coefficient", "entropy_coefficient", "behavior_kl_coefficient"):
            assert kind(**{term: 0.1}).trains_every_row
    for objective in OBJECTIVES.values():
        assert objective.needs_reference == (objective.kl_coefficient > 0)


@pytest.mark.parametrize("kind", TRUSTED)
def test_an_infinite_trust_region_is_reinforce_on_the_ratio_to_the_sampler(kind) -> None:
    inputs = packed_inputs(9, drift=0.8, kept=0.7)
    bypassed = changed(inputs, proximal_logprobs=inputs.behavior_logprobs)
    found = gradients(kind(**dict.fromkeys(TRUSTED[kind], 1e9)), inputs)[1]
    torch.testing.assert_close(found, gradients(Reinforce(ratio_cap=1e9), bypassed)[1])


@pytest.mark.parametrize("kind", [DppoTv, DppoKl])
def test_a_token_is_masked_where_its_advantage_would_move_it_further_away(kind) -> None:
    # Likelier by more than each bound, less likely by more, and within it; then the certain and the impossible.
    p = torch.tensor([0.9, 0.9, 0.3, 0.3, 0.5, 0.5, 1.0, 1e-30], dtype=torch.float64).log().float()
    q = torch.tensor([0.4, 0.4, 0.8, 0.8, 0.49, 0.51, 0.5, 0.5], dtype=torch.float64).log().float()
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    inputs = changed(
        packed_inputs(0, (8,), dtype=torch.float32),
        current_logprobs=p.requires_grad_(),
        behavior_logprobs=q,
        importance_weights=torch.ones(8),
        advantages=sign,
    )
    _, gradient, _ = gradients(kind(), inputs)
    kept = torch.tensor([False, True, True, False, True, True, False, False])
    assert torch.equal(gradient != 0, kept)
    torch.testing.assert_close(gradient[kept], (-(p - q).exp() * sign / inputs.denominator).detach()[kept])
    names = ("policy_clipped_frac", "policy_clipped_low_frac", "policy_clipped_high_frac")
    assert [int(kind()(inputs).metrics[name]) for name in names] == [4, 2, 2]


def test_tvpo_masks_by_the_whole_rows_divergence_what_would_move_it_further() -> None:
    # A row that is too far away, and one with a token as far that is near on the whole; a masked token counts in none.
    ratio = torch.tensor([1.5, 0.9, 0.7, 9.0, 1.5, 1.0, 1.01], dtype=torch.float64)
    inputs = changed(
        packed_inputs(0, (4, 3)),
        current_logprobs=(ratio.log() - 2).requires_grad_(),
        behavior_logprobs=torch.full_like(ratio, -2.0),
        importance_weights=torch.ones_like(ratio),
        advantages=torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True, True, False, True, True, True]),
    )
    gradient = gradients(Tvpo(bound=0.25), inputs)[1] * -inputs.denominator
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.9, 0.0, 0.0, 1.5, 1.0, 1.01], dtype=torch.float64))


OF_ANY = (
    {"aggregation": "mean"},
    {"constant_denominator": 5.0},
    {"kl_coefficient": -0.1},
    {"kl_coefficient": float("nan")},
    {"kl_importance_weighted": 1},
    {"kl_estimator": "k4"},
    {"entropy_coefficient": "0.1"},
    {"behavior_kl_coefficient": -1e-3},
    {"full_rate_ess": 0.0},
    {"full_rate_ess": 1.5},
)
OF_CLIPPED = (
    {"clip_low": 0.0},
    {"clip_low": 1.5},
    {"clip_high": -0.1},
    {"clip_high": float("inf")},
    {"clip_high": True},
    {"dual_clip": 1.0},
)
BAD: list[tuple[type, dict[str, Any]]] = [
    *((kind, arguments) for kind in EVERY_CLASS for arguments in OF_ANY),
    *((kind, arguments) for kind in (Grpo, Dapo, Gspo, DecoupledPpo) for arguments in OF_CLIPPED),
    (Grpo, {"constant_denominator": None, "aggregation": "constant"}),
    (Grpo, {"constant_denominator": 0, "aggregation": "constant"}),
    (Gspo, {"gradient": "row"}),
    (Cispo, {"clip_low": 0.0}),
    (Cispo, {"clip_high": 0.0}),
    (Reinforce, {"ratio_cap": 0.5}),
    *((kind, {bound: value}) for kind, bounds in TRUSTED.items() for bound in bounds for value in (0, "1")),
    (Sapo, {"temperature_positive": 0.0}),
    (Sapo, {"temperature_negative": -1.0}),
    (DecoupledPpo, {"proximal": "old"}),
    (DecoupledPpo, {"total_weight_cap": None, "proximal": "loglinear"}),
    (DecoupledPpo, {"total_weight_cap": 0.5, "proximal": "linear"}),
    (DecoupledPpo, {"total_weight_cap": 5.0}),
]


def test_arguments_out_of_range_are_refused_by_name_and_value() -> None:
    for kind, arguments in BAD:
        name, value = next(iter(arguments.items()))
        with pytest.raises(ValueError) as caught:
            kind(**arguments)
        assert str(caught.value).startswith(f"{kind.__name__}: {name} is {value!r}, expected "), arguments


def test_a_run_file_plugs_each_by_path() -> None:
    for kind in EVERY_CLASS:
        plug = Plug(path=f"{kind.__module__}:{kind.__name__}", kwargs={"entropy_coefficient": 0.01})
        assert construct(plug, "objective", Objective) == kind(entropy_coefficient=0.01)
        # A plain signature lets a wrong name be refused before anything runs.
        with pytest.raises(TypeError, match="clip_hi"):
            inspect.signature(kind).bind(clip_hi=0.3)


def test_a_correction_without_a_mode_is_what_its_objective_can_do() -> None:
    truncation, by_clip, none = ("token_truncate", False), ("none", True), ("none", False)
    for objective, correction, expected in (
        (Grpo(), CorrectionConfig(), truncation),
        (Gspo(), CorrectionConfig(), by_clip),
        (Reinforce(), CorrectionConfig(), truncation),
        (DppoTv(), CorrectionConfig(), none),
        (Grpo(), CorrectionConfig(proximal="sampled_version"), truncation),
        (Reinforce(), CorrectionConfig(bypass=True), by_clip),
        (Grpo(), CorrectionConfig("none"), none),
        (Grpo(), CorrectionConfig("sequence_mask"), ("sequence_mask", False)),
    ):
        found = settled_correction(configuration("model", correction=correction), objective)
        assert (found.mode, found.bypass) == expected, (objective, correction)
