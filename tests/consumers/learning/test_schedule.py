"""The learning rate's schedules, against those of transformers."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from penstock.consumers.learning.model.schedule import learning_rate
from penstock.schemas.config import TrainerConfig
from training_groups import configuration

PEAK, PLANNED = 0.5, 40
WSD = {"num_decay_steps": 10, "decay_type": "linear"}
CASES = [
    ("constant_with_warmup", {}, {}),
    ("linear", {"decay": "linear"}, {}),
    ("cosine", {"decay": "cosine"}, {}),
    ("warmup_stable_decay", {"decay": "linear", "decay_steps": 10}, WSD),
    ("warmup_stable_decay", {"decay": "cosine", "decay_steps": 10}, WSD | {"decay_type": "cosine"}),
]


def _rates(warmup: int, **settings: Any) -> list[float]:
    trainer = TrainerConfig(learning_rate=PEAK, warmup_steps=warmup, num_epochs=2, **settings)
    config = configuration("none", trainer=trainer, num_updates=PLANNED // 2)
    return [learning_rate(config, step) for step in range(PLANNED + 1)]


def _rates_of_transformers(name: str, warmup: int, specific: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = get_scheduler(name, optimizer, warmup, PLANNED, scheduler_specific_kwargs=specific)
    rates = []
    for _ in range(PLANNED + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("name", "settings", "specific"), CASES)
def test_the_rates_are_those_of_transformers_with_a_warm_up_that_begins_above_0(
    name, settings, specific, warmup
) -> None:
    rates, expected = _rates(warmup, **settings), _rates_of_transformers(name, warmup, specific)
    assert rates[:warmup] == pytest.approx(expected[1 : warmup + 1])
    assert rates[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("settings", [settings for _, settings, _ in CASES])
def test_the_peak_is_reached_at_the_end_of_the_warm_up_and_never_passed(settings, warmup) -> None:
    rates = _rates(warmup, **settings)
    assert max(rates) == rates[max(0, warmup - 1)] == rates[warmup] == PEAK
    assert min(rates[:PLANNED]) > 0
    if "decay" in settings:
        assert rates[PLANNED] == 0


@pytest.mark.parametrize("warmup", [PLANNED, 1_000])
def test_a_warm_up_as_long_as_the_run_has_no_decay(warmup) -> None:
    rates = _rates(warmup, decay="linear")
    assert rates[PLANNED - 1] == PEAK * PLANNED / warmup
