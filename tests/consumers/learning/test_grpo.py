"""GRPO's clip: which side it acts on, and how far."""

import pytest
import torch

from objective_cases import changed, gradients, packed_inputs
from penstock.consumers.learning.interfaces import LossInputs
from penstock.consumers.learning.objectives.dapo import Dapo
from penstock.consumers.learning.objectives.grpo import Grpo


def _ratios(ratios: list[float], advantage: float) -> LossInputs:
    """One token of each policy ratio, of weight 1, all of one advantage."""
    inputs = packed_inputs(0, (len(ratios),))
    current = inputs.proximal_logprobs + torch.tensor(ratios, dtype=torch.float64).log()
    return changed(
        inputs,
        current_logprobs=current.requires_grad_(),
        advantages=torch.full_like(inputs.advantages, advantage),
        importance_weights=torch.ones_like(inputs.advantages),
        denominator=1.0,
    )


@pytest.mark.parametrize(
    ("objective", "advantage", "expected"),
    [
        # d loss / d logprob is -A r inside, 0 where clipped.
        (Grpo(), 2.0, [-1.0, -1.58, -2.0, -2.38, 0.0, 0.0, 0.0]),
        (Grpo(), -2.0, [0.0, 0.0, 2.0, 2.38, 2.5, 2.7, 10.0]),
        (Grpo(dual_clip=3.0), -2.0, [0.0, 0.0, 2.0, 2.38, 2.5, 2.7, 0.0]),
        (Grpo(dual_clip=3.0), 2.0, [-1.0, -1.58, -2.0, -2.38, 0.0, 0.0, 0.0]),
        (Dapo(), 2.0, [-1.0, -1.58, -2.0, -2.38, -2.5, 0.0, 0.0]),
    ],
)
def test_the_clip_acts_on_the_side_that_the_advantage_points_to(objective, advantage, expected) -> None:
    inputs = _ratios([0.5, 0.79, 1.0, 1.19, 1.25, 1.35, 5.0], advantage)
    torch.testing.assert_close(gradients(objective, inputs)[1], torch.tensor(expected, dtype=torch.float64))


def test_a_dual_clip_bounds_what_a_token_of_negative_advantage_costs() -> None:
    inputs = _ratios([5.0, 400.0], -2.0)
    assert Grpo()(inputs).loss.item() == pytest.approx(2 * 405)
    output = Grpo(dual_clip=3.0)(inputs)
    assert output.loss.item() == pytest.approx(2 * 3 * 2)
    assert output.metrics["policy_dual_clipped_frac"] == 2


def test_clipped_tokens_are_counted_by_side() -> None:
    above, below = _ratios([0.5, 1.0, 1.3, 1.4], 1.0), _ratios([0.5, 0.6, 1.0, 1.4, 0.7], -1.0)
    names = ("policy_clipped_frac", "policy_clipped_low_frac", "policy_clipped_high_frac")
    assert [Grpo()(above).metrics[name].item() for name in names] == [2, 0, 2]
    assert [Grpo()(below).metrics[name].item() for name in names] == [3, 3, 0]
    masked = changed(below, loss_mask=torch.tensor([True, False, True, True, False]))
    assert [Grpo()(masked).metrics[name].item() for name in names] == [1, 1, 0]


def test_dapo_is_grpo_with_the_papers_bounds() -> None:
    inputs = _ratios([0.75, 1.0, 1.25, 1.35], 1.0)
    assert torch.equal(Dapo()(inputs).loss, Grpo(clip_high=0.28)(inputs).loss)
    assert not torch.equal(Dapo()(inputs).loss, Grpo()(inputs).loss)
