"""Rounding of the masters to the published policy: where they begin, how far the policy follows them."""

import logging

import pytest
import torch
from torch import nn

from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.rounding import Movement, dither
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ModelConfig, TrainerConfig
from training_groups import configuration, lag_from, random_group, tiny_model

BFLOAT16 = torch.bfloat16


def _module(**values: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in values.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


def _typical(size: int = 200_000) -> torch.Tensor:
    return (0.02 * torch.randn(size, generator=torch.Generator().manual_seed(5))).to(BFLOAT16).float()


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_dithered_masters_publish_the_models_own_bits(dtype) -> None:
    """Every positive and negative number of the type, zeros, subnormals and the largest included."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    every = bits.view(dtype)
    every = every[every.isfinite()].float()
    module = _module(every=every.clone(), between=torch.tensor([0.1, -1e-3]))
    dither(module, dtype, 3)
    assert torch.equal(module.every.to(dtype).view(torch.int16), every.to(dtype).view(torch.int16))
    assert (module.every != every).float().mean() > 0.98
    assert torch.equal(module.between, torch.tensor([0.1, -1e-3])), "its place is its own already"
    assert not module.every[every == 0].any()


def test_places_depend_on_seed_name_and_element_alone() -> None:
    values = _typical(512)
    first, second = _module(a=values.clone(), b=values.clone()), _module(b=values.clone())
    dither(first, BFLOAT16, 7)
    dither(second, BFLOAT16, 7)
    assert torch.equal(first.b, second.b)
    assert not torch.equal(first.a, first.b)
    other = _module(b=values.clone())
    dither(other, BFLOAT16, 8)
    assert not torch.equal(other.b, first.b)


def test_dithering_equals_a_fixed_threshold_for_each_weight() -> None:
    """Within a binade: floor to the grid, and one unit up where the fraction exceeds the weight's threshold."""
    unit = 2.0**-9  # from 0.25 on
    base = 0.375 + unit * torch.arange(-8, 8).float().repeat(64)
    module = _module(w=base.clone())
    dither(module, BFLOAT16, 0)
    threshold = 0.5 - (module.w.detach() - base) / unit
    assert threshold.min() < 0.01 and threshold.max() > 0.99
    for moved in torch.linspace(-3 * unit, 3 * unit, 41):
        steps = ((base + moved) / unit).double()
        fraction = steps - steps.floor()
        published = (module.w.detach() + moved).to(BFLOAT16).double() / unit
        is_clear = (fraction - threshold).abs() > 1e-3  # float32 sums round
        expected = steps.floor() + (fraction > threshold)
        assert torch.equal(published[is_clear], expected[is_clear]), moved


def test_a_dithered_policy_makes_the_whole_movement_from_the_first_step() -> None:
    for rate in (2e-5, 1e-6):
        made = {}
        for is_dithered in (False, True):
            module = _module(w=_typical())
            if is_dithered:
                dither(module, BFLOAT16, 0)
            movement = Movement(list(module.parameters()), BFLOAT16, Ranks())
            assert movement.published_share() == 1.0
            sign = torch.where(torch.rand(module.w.shape, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0)
            module.w.data += rate * sign
            made[is_dithered] = movement.published_share()
        assert made[True] == pytest.approx(1.0, abs=0.15), rate
        assert made[False] < 0.4 * made[True], rate


def test_half_of_the_weights_move_within_fifty_steps_at_the_slowest_rate() -> None:
    module = _module(w=_typical())
    rate = Movement(list(module.parameters()), BFLOAT16, Ranks()).slowest_rate()
    for share, factor in ((0.0, 0.2), (0.5, 1.001), (1.0, 60.0)):
        outwards = module.w + 50 * factor * rate * module.w.sign()
        changed = (outwards.to(BFLOAT16) != module.w.to(BFLOAT16))[module.w != 0].float().mean().item()
        assert changed == pytest.approx(share, abs=0.15), factor


def _trained(folder, caplog, rounding, rate) -> tuple[Learner, dict[str, torch.Tensor], float]:
    config = configuration(
        folder,
        model=ModelConfig(path=str(folder), dtype="bfloat16", rounding=rounding),
        trainer=TrainerConfig(device="cpu", learning_rate=rate),
    )
    with caplog.at_level(logging.WARNING):
        learner = Learner(config)
    start = learner.published_weights()
    report = learner.step(pack([random_group(i, 0) for i in range(1, 6)], lag_from(7), config))
    return learner, start, report.metrics["published_movement"]


def test_a_run_dithers_by_default_and_says_what_drowns_otherwise(tmp_path, caplog) -> None:
    base = tiny_model(tmp_path).to(BFLOAT16)
    base.save_pretrained(tmp_path)
    for rounding, expected in ((None, pytest.approx(1.0, abs=0.5)), ("nearest", pytest.approx(0.0, abs=0.1))):
        assert caplog.text == ""
        _, start, movement = _trained(tmp_path, caplog, rounding, 1e-6)
        assert movement == expected
        assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in start.items())
    assert "trainer.learning_rate = 1e-06 with model.rounding = 'nearest'" in caplog.text


def test_a_checkpoint_keeps_the_places(tmp_path, caplog) -> None:
    tiny_model(tmp_path / "tiny").to(BFLOAT16).save_pretrained(tmp_path / "tiny")
    learner, _, movement = _trained(tmp_path / "tiny", caplog, "dithered", 1e-5)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    learner.begin_checkpoint(folder).result()
    resumed = Learner(learner.config)
    resumed.load_checkpoint(folder, learner.state())
    pairs = list(zip(learner.model.parameters(), resumed.model.parameters(), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    assert resumed._movement is not None
    assert resumed._movement.published_share() == movement
