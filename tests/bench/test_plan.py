"""The part of a run whose speed is known."""

import pytest

from bench.plan.part import PacedEngine, PartPace
from bench.plan.section import plan_figures
from penstock.deploy.plan.planning import Plan
from penstock.schemas.config import config_of
from penstock.schemas.rollout import SamplingSettings, VersionSpan

PACE = PartPace(base_s=0.001, sequence_s=0.0, median=5.0, sigma=0.0, pause_s=0.0, update_s=0.0)
CONFIG = config_of(
    {"name": "paced", "model": {"path": ""}, "environment": {"path": "a:b"}, "engine": {"max_num_seqs": 2}}, "", {}
)


@pytest.mark.asyncio
async def test_a_paced_engine_labels_what_it_samples_and_seats_everybody_in_the_end():
    engine = PacedEngine(PACE, CONFIG, seed=1)
    for version in (0, 7):
        engine.policy_version = version
        completions = await engine.generate([1], SamplingSettings(max_tokens=4), 3, "a")
        assert [len(each.token_ids) // 4 for each in completions] == [4, 4, 4]
        assert {each.version_spans for each in completions} == {(VersionSpan(version, 0, 4),)}
        assert {each.finish_reason for each in completions} == {"length"}
    await engine.close()


def test_a_plan_is_off_by_a_factor_either_way():
    found = Plan(
        name="a",
        num_producers=1,
        pace={},
        planned={"updates_per_s": 2.0, "lag_mean": 1.0},
        recorded={"updates_per_s": 1.9, "lag_mean": 1.2},
    )
    rate, lag = plan_figures("as it was", found)
    assert rate.ratio == pytest.approx(2 / 1.9) and rate.reached
    assert lag.ratio == pytest.approx(1.2) and not lag.reached
