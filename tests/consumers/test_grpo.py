"""GRPO's loss and gradient against the peers' own functions."""

from typing import Any

import pytest
import torch
from golden_corrections import Golden, per_token

from consumers.importance import correct
from consumers.interfaces import LossInputs
from consumers.objectives.grpo import Grpo
from schemas.config import CorrectionConfig

NONE = CorrectionConfig(mode="none")
TRUNCATE_2 = CorrectionConfig(mode="token_truncate", threshold=2.0)
TRUNCATE_3 = CorrectionConfig(mode="token_truncate", threshold=3.0)
MASK_1_25 = CorrectionConfig(mode="token_mask", threshold=1.25)
MASK_5 = CorrectionConfig(mode="token_mask", threshold=5.0)
ROLLOUT: dict[str, Any] = {"aggregation": "rollout"}
HIGHER: dict[str, Any] = {"clip_high": 0.28}

# source, its variant's name, the objective's arguments, the correction
VARIANTS = [
    ("trl", "grpo", ROLLOUT, NONE),
    ("trl", "dapo_clip_higher", HIGHER, NONE),
    ("trl", "grpo+token_truncate", ROLLOUT, TRUNCATE_3),
    ("ms-swift", "grpo", ROLLOUT, NONE),
    ("ms-swift", "dapo_clip_higher", HIGHER, NONE),
    ("ms-swift", "grpo+token_truncate@2", ROLLOUT, TRUNCATE_2),
    ("ms-swift", "grpo+token_mask@1.25", ROLLOUT, MASK_1_25),
    ("verl", "ppo_clip", {"dual_clip": 3.0}, NONE),
    ("verl", "dapo_clip_higher", HIGHER | {"dual_clip": 10.0}, NONE),
    ("verl", "decoupled_token_tis", {"dual_clip": 3.0}, TRUNCATE_2),
    ("nemo-rl", "grpo", {}, NONE),
    ("nemo-rl", "tis@2", {}, TRUNCATE_2),
    ("nemo-rl", "dapo_clip_higher_dual", HIGHER | {"dual_clip": 3.0}, NONE),
    ("slime", "ppo_clip", ROLLOUT, NONE),
    ("slime", "dapo_clip_higher", ROLLOUT | HIGHER, NONE),
    ("areal", "no_rs", {}, NONE),
    ("areal", "decoupled_token_mask@5", {}, MASK_5),
    ("areal", "decoupled_token_clamp@2", {}, TRUNCATE_2),
    ("areal", "decoupled_clip_higher_dual", HIGHER | {"dual_clip": 3.0}, MASK_5),
]


def _inputs(golden: Golden, correction: CorrectionConfig, current: torch.Tensor) -> LossInputs:
    """The rows of a golden file laid end to end, poison under the mask."""
    proximal, behavior = golden.poisoned(golden.proximal), golden.poisoned(golden.behavior)
    corrected = correct(proximal, behavior, golden.mask, golden.lag, correction)
    num_rows, width = golden.mask.shape
    return LossInputs(
        current_logprobs=current.flatten(),
        proximal_logprobs=proximal.flatten(),
        behavior_logprobs=behavior.flatten(),
        importance_weights=corrected.weights.flatten(),
        advantages=golden.poisoned(golden.advantages).flatten(),
        loss_mask=corrected.keep_mask.flatten(),
        entropy=torch.full((num_rows * width,), float("nan"), dtype=torch.float64),
        row_ids=torch.arange(num_rows).repeat_interleave(width),
        rollout_tokens=golden.mask.sum(1, keepdim=True).expand(num_rows, width).flatten().double(),
        denominator=float(golden.mask.sum()),
        num_rollouts=num_rows,
    )


@pytest.mark.parametrize("case", ["case04_mixed_lag_in_sequence", "case09_multi_turn_holes"])
@pytest.mark.parametrize(("source", "variant", "arguments", "correction"), VARIANTS)
def test_loss_and_gradient_reproduce(source, variant, arguments, correction, case) -> None:
    golden = Golden(f"{source}.losses.{case}")
    expected = golden.outputs[variant]
    current = golden.poisoned(golden.current).requires_grad_()
    loss = Grpo(**arguments)(_inputs(golden, correction, current)).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=2e-6)
    torch.testing.assert_close(current.grad, per_token(expected["grad"]), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("case", ["case04_mixed_lag_in_sequence", "case09_multi_turn_holes"])
@pytest.mark.parametrize(("source", "variant", "name", "arguments"), [
    ("verl", "ppo_clip", "actor/pg_clipfrac", {"dual_clip": 3.0}),
    ("ms-swift", "grpo", "region_clip_mean", ROLLOUT),
])  # fmt: skip
def test_the_clipped_share_reproduces(source, variant, name, arguments, case) -> None:
    golden = Golden(f"{source}.losses.{case}")
    outputs = Grpo(**arguments)(_inputs(golden, NONE, golden.current))
    share = outputs.metrics["policy_clipped_frac"].item() / golden.mask.sum().item()
    assert share == pytest.approx(golden.outputs[variant]["metrics"][name], rel=1e-6)


def _random_inputs(m: int = 9, **changes: Any) -> LossInputs:
    generator = torch.Generator().manual_seed(3)
    current = (-3 * torch.rand(m, generator=generator, dtype=torch.float64)).requires_grad_()
    fields: dict[str, Any] = {
        "current_logprobs": current,
        "proximal_logprobs": current.detach() + 0.3 * torch.randn(m, generator=generator, dtype=torch.float64),
        "behavior_logprobs": current.detach(),
        "importance_weights": torch.rand(m, generator=generator, dtype=torch.float64) + 0.5,
        "advantages": torch.randn(m, generator=generator, dtype=torch.float64),
        "loss_mask": torch.ones(m, dtype=torch.bool),
        "entropy": torch.rand(m, generator=generator, dtype=torch.float64).requires_grad_(),
        "row_ids": torch.arange(m) // 3,
        "rollout_tokens": torch.full((m,), 3.0, dtype=torch.float64),
        "denominator": 40.0,
        "num_rollouts": 12,
    } | changes
    return LossInputs(**fields)


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_micro_batches_add_up(aggregation) -> None:
    inputs = _random_inputs()
    objective = Grpo(aggregation=aggregation, entropy_coefficient=0.01)
    parts = []
    for part in (slice(0, 3), slice(3, 9)):
        tensors = {k: v[part] for k, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
        parts.append(objective(LossInputs(**(vars(inputs) | tensors))))
    whole = objective(inputs)
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    for name, value in whole.metrics.items():
        assert parts[0].metrics[name] + parts[1].metrics[name] == value


def test_a_fully_masked_batch_has_loss_0_and_a_live_graph() -> None:
    nan = torch.full((4,), float("nan"), requires_grad=True)
    inputs = _random_inputs(4, current_logprobs=nan, loss_mask=torch.zeros(4, dtype=torch.bool))
    loss = Grpo(dual_clip=3.0, entropy_coefficient=0.1)(inputs).loss
    loss.backward()
    assert loss.item() == 0
    assert not nan.grad.any()


def test_masking_a_token_never_raises_the_gradient_of_another() -> None:
    inputs = _random_inputs()
    mask = inputs.loss_mask.clone()
    mask[4] = False
    whole = torch.autograd.grad(Grpo()(inputs).loss, inputs.current_logprobs)[0]
    masked = torch.autograd.grad(Grpo()(_replace(inputs, loss_mask=mask)).loss, inputs.current_logprobs)[0]
    assert masked[4] == 0
    assert torch.equal(masked[mask], whole[mask])


def test_at_the_proximal_policy_the_gradient_is_the_weighted_policy_gradient() -> None:
    inputs = _random_inputs()
    inputs = _replace(inputs, proximal_logprobs=inputs.current_logprobs.detach())
    gradient = torch.autograd.grad(Grpo()(inputs).loss, inputs.current_logprobs)[0]
    torch.testing.assert_close(gradient, -inputs.importance_weights * inputs.advantages / 40.0)


def test_ratios_beyond_every_bound_stay_finite() -> None:
    current = torch.tensor([-1e4, 0.0, -1.0], requires_grad=True)
    inputs = _random_inputs(
        3, current_logprobs=current, proximal_logprobs=torch.tensor([0.0, -1e4, -1.0]), advantages=torch.ones(3) * -1
    )
    loss = Grpo()(inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(current.grad).all()


def test_the_entropy_bonus_reaches_the_entropys_gradient() -> None:
    inputs = _random_inputs()
    gradient = torch.autograd.grad(Grpo(entropy_coefficient=0.5)(inputs).loss, inputs.entropy)[0]
    torch.testing.assert_close(gradient, torch.full_like(gradient, -0.5 / 40))


def test_gradcheck_between_the_kinks() -> None:
    inputs = _random_inputs()
    objective = Grpo(dual_clip=1.5, entropy_coefficient=0.1)
    assert torch.autograd.gradcheck(
        lambda current, entropy: objective(_replace(inputs, current_logprobs=current, entropy=entropy)).loss,
        (inputs.current_logprobs, inputs.entropy),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"clip_low": 0.0},
        {"clip_low": 1.5},
        {"clip_high": -0.1},
        {"dual_clip": 1.0},
        {"aggregation": "mean"},
        {"entropy_coefficient": -1.0},
        {"clip_high": float("nan")},
    ],
)
def test_arguments_out_of_range_are_refused_by_name(arguments) -> None:
    with pytest.raises(ValueError, match=f"Grpo: {next(iter(arguments))} is"):
        Grpo(**arguments)


def _replace(inputs: LossInputs, **changes: Any) -> LossInputs:
    return LossInputs(**(vars(inputs) | changes))
