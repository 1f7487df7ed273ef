"""The learning rate follows the effective sample size of the rows' weights."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.loss.ess import rate_factor, weight_sums
from penstock.schemas.config import Plug, TrainerConfig
from training_groups import configuration, lag_from, random_groups, tiny_model, weights_of

GRPO = "penstock.consumers.learning.objectives.grpo:Grpo"
rows_of_gaps = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=5), min_size=1)


@given(rows=rows_of_gaps, full=st.floats(0.01, 1))
@settings(deadline=None)
def test_it_is_the_formula_of_the_source_blind_to_what_is_masked(rows, full) -> None:
    rows = [*rows, [(0.5, True), (9.0, False)]]
    totals = [sum(gap for gap, kept in row if kept) for row in rows if any(kept for _, kept in row)]
    weights = [math.exp(max(-20.0, min(20.0, total))) for total in totals]
    ess = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    gap = torch.tensor([gap if kept else math.nan for row in rows for gap, kept in row], dtype=torch.float64)
    kept = torch.tensor([kept for row in rows for _, kept in row])
    row_ids = torch.tensor([n for n, row in enumerate(rows) for _ in row])
    cut = len(rows[0])
    sums = sum(weight_sums(gap[part] - 1, -torch.ones_like(gap[part]), kept[part], row_ids[part])
               for part in (slice(cut), slice(cut, None)))  # fmt: skip
    assert rate_factor(sums, full) == pytest.approx(math.sqrt(min(1.0, ess / full)), rel=1e-9)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_step_of_few_effective_rows_is_smaller_and_reports_its_rate(tmp_path, epochs) -> None:
    tiny_model(tmp_path)
    rates, groups = {}, random_groups(6)
    for full in (None, 1e-9, 1.0):
        trainer = TrainerConfig(device="cpu", learning_rate=0.125, num_epochs=epochs)
        objective = Plug(path=GRPO, kwargs={"full_rate_ess": full})
        learner = Learner(configuration(tmp_path, trainer=trainer, objective=objective))
        taken: list[float] = []
        learner.optimizer.register_step_pre_hook(lambda own, *_, taken=taken: taken.append(own.param_groups[0]["lr"]))
        report = learner.step(learner.pack(groups, lag_from(7)))
        rates[full] = taken, report.metrics["learning_rate"], weights_of(learner)
    batch = learner.pack(groups, lag_from(7))
    fresh = Learner(configuration(tmp_path, trainer=TrainerConfig(device="cpu")))
    expected = sum(
        weight_sums(fresh.scorer.logprobs(each)[0], each.behavior_logprobs, each.loss_mask, each.row_ids)
        for each in batch.microbatches
    )
    assert len(rates[1.0][0]) == epochs and rates[None][0] == rates[1e-9][0] == [0.125] * epochs
    assert rates[1.0][0][0] == rates[1.0][1] == pytest.approx(0.125 * rate_factor(expected, 1.0), rel=1e-5)
    assert 0 < rates[1.0][1] < 0.1
    assert all(torch.equal(tensor, rates[1e-9][2][name]) for name, tensor in rates[None][2].items())
