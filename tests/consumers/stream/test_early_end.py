"""Runs that evaluations end: at their goal, or once they get no better."""

import json

import msgspec
import pytest

from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.stream.early_end import EarlyEnd
from penstock.consumers.stream.evaluation import EvaluationResult
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.config import ConfigError, config_of

BASE = {"name": "r", "model": {"path": "m"}, "environment": {"path": "a:B"}}


def result(reward: float, update: int = 1, **own: float) -> EvaluationResult:
    return EvaluationResult(update, 1, {"reward": reward, **own}, 1, 0, {"main": {"reward": 1 - reward}})


@pytest.mark.parametrize(
    ("settings", "rewards", "reason"),
    [
        ({}, [0.1] * 9, ""),
        ({"goal": {"value": 0.5}}, [0.1, 0.9], ""),
        ({"goal": {"value": 0.5}, "stop_at_goal": True}, [0.1, 0.49], ""),
        (
            {"goal": {"value": 0.5}, "stop_at_goal": True},
            [0.1, 0.5, 0.9],
            "held-out reward 0.5000 has reached the goal of 0.5",
        ),
        ({"patience": 2}, [0.3, 0.2, 0.4, 0.4], ""),
        ({"patience": 2}, [0.3, 0.2, 0.3], "2 evaluations in a row have held-out reward no better than 0.3000"),
        (
            {"patience": 2, "best": "environments/main/reward"},
            [0.3, 0.4, 0.5],
            "2 evaluations in a row have held-out environments/main/reward no better than 0.7000",
        ),
        ({"patience": 1, "best": "reward/exact"}, [0.3, 0.2], ""),
    ],
)
def test_a_run_ends_at_its_goal_or_once_its_patience_is_at_an_end(settings, rewards, reason) -> None:
    best = {key: settings[key] for key in settings.keys() & {"best"}}
    evaluation = {key: settings[key] for key in settings.keys() - {"best"}}
    config = config_of(BASE | {"evaluation": evaluation, "checkpoint": best}, "x")
    state = CheckpointState(policy_version=0)
    for update, reward in enumerate(rewards):  # each in a trainer that continues from the checkpoint of the one before
        early_end = EarlyEnd(config, progress := RunProgress(0, state))
        early_end.consider(result(reward, update))
        if early_end.reason:
            break
        early_end.consider(result(0.0, update))  # where it continues it evaluates what was evaluated
        saved = msgspec.json.encode(CheckpointState(policy_version=0, best=progress.best))
        state = msgspec.json.decode(saved, type=CheckpointState)
    assert early_end.reason == reason


def test_settings_that_can_end_no_run_are_refused() -> None:
    for evaluation, said in (
        ({"stop_at_goal": True}, "evaluation.stop_at_goal = True without evaluation.goal: expected a goal"),
        (
            {"patience": 2, "num_prompts": 0},
            "evaluation.patience = 2 with evaluation.num_prompts = 0: expected held-out",
        ),
        ({"patience": 0}, "evaluation.patience = 0: Expected `int` >= 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            config_of(BASE | {"evaluation": evaluation}, "x")


@pytest.mark.redis
@pytest.mark.parametrize("rises", [True, False])
def test_a_run_that_ends_early_is_complete(bench, redis_client, rises: bool) -> None:
    bench.overrides = ["num_updates=100000", "evaluation.every=2"]
    bench.overrides += (
        ["evaluation.goal.value=0.25", "evaluation.stop_at_goal=true"] if rises else ["evaluation.patience=3"]
    )
    producer = bench.producer()
    producer.held_out = lambda version: version / 32 if rises else 0.5
    trainer = bench.trainer()
    assert trainer.run()
    ledger = bench.ledger()
    reason = (
        "has reached the goal of 0.25" if rises else "3 evaluations in a row have held-out reward no better than 0.5"
    )
    assert ledger["finished"] and reason in ledger["ended_early"]
    assert redis_client.hget(bench.keys.commit, "finished") == b"1"
    assert (8 if rises else 6) <= ledger["num_updates"] < 100000
    evaluations = bench.lines("evaluations.jsonl")
    assert evaluations[-1]["update"] == ledger["num_updates"], "the last policy has its evaluation"
    assert json.loads((bench.folder / "model" / "trained.json").read_text()) == trainer.learner.trained
    assert ledger["num_groups_trained"] == 4 * ledger["num_updates"]
    assert ledger["num_groups_released"] == ledger["num_groups_trained"] + ledger["num_groups_cancelled"]
