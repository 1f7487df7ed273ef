"""The learning rate's schedules, against those of transformers."""

import itertools
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


def test_the_rates_are_those_of_transformers_with_a_warm_up_that_begins_above_0() -> None:
    for (name, settings, specific), warmup in itertools.product(CASES, (0, 1, 7)):
        case = name, settings, warmup
        rates, expected = _rates(warmup, **settings), _rates_of_transformers(name, warmup, specific)
        assert rates[:warmup] == pytest.approx(expected[1 : warmup + 1]), case
        assert rates[warmup:] == pytest.approx(expected[warmup:], abs=1e-12), case
        assert max(rates) == rates[max(0, warmup - 1)] == rates[warmup] == PEAK, case
        assert min(rates[:PLANNED]) > 0 and (rates[PLANNED] == 0) == ("decay" in settings), case
    for warmup in (PLANNED, 1_000):
        assert _rates(warmup, decay="linear")[PLANNED - 1] == PEAK * PLANNED / warmup, "no decay"
