"""The warm start in the trainer's loop, on a real server: what is published first, what a killed trainer repeats."""

import pytest

from penstock.consumers.learning.learner import warm_start
from penstock.consumers.observe import run_log
from penstock.schemas.policy import VERSIONS_PER_EPOCH
from penstock.schemas.weights.log import read_log
from scripted_learner import KilledError
from trainer_bench import TrainerBench, assert_balanced
from training_groups import segment

pytestmark = pytest.mark.redis


@pytest.fixture
def warm(bench: TrainerBench, monkeypatch: pytest.MonkeyPatch) -> TrainerBench:
    """A run with ten steps on demonstrations; a checkpoint every four."""
    found = [(segment([1, 2], [(1, 2)], [-1]),)]
    monkeypatch.setattr(warm_start, "read_demonstrations", lambda config, longest: found)
    bench.overrides = ["warm_start.demonstrations=demonstrations.jsonl", "warm_start.steps=10", "num_updates=5"]
    return bench


def test_what_a_warm_start_led_to_is_the_first_policy(warm, redis_client, caplog, monkeypatch):
    monkeypatch.setattr(run_log, "WARM_LINE_S", 0.0)
    caplog.set_level("INFO")
    warm.producer()
    trainer = warm.trainer()
    assert trainer.run()
    assert [line["policy_version"] for line in warm.lines("evaluations.jsonl")] == [10, 15]
    assert [line["policy_version"] for line in warm.lines("updates.jsonl")] == [11, 12, 13, 14, 15]
    lines = warm.lines("warm_start.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 11)) and lines[3]["loss"] == 0.25
    assert "warm start: step 4 of 10, loss 0.2500" in caplog.text
    assert (trainer.learner.num_warm_steps, trainer.learner.num_steps) == (10, 5)
    assert min(read_log(redis_client, warm.keys).announced) == 10
    assert_balanced(warm, trainer)


@pytest.mark.parametrize(("killed_at", "is_resumed_from"), [(-1, 0), (-7, 4), (-9, 8), (0, 10), (3, 10)])
def test_a_killed_trainer_repeats_no_step_that_was_committed(warm, killed_at, is_resumed_from):
    warm.producer()
    with pytest.raises(KilledError):
        warm.trainer(fail_at={killed_at: KilledError()}).run()
    second = warm.trainer(resume=True)
    assert second.learner.num_warm_steps == is_resumed_from
    assert second.run()
    assert (second.learner.num_warm_steps, second.learner.num_steps) == (10, 5)
    assert second.policy.version == VERSIONS_PER_EPOCH + 5 + 10 - is_resumed_from
    taken = [line["step"] for line in warm.lines("warm_start.jsonl")]
    assert taken == [*range(1, -killed_at if killed_at < 0 else 11), *range(is_resumed_from + 1, 11)]
    assert sorted(second.learner.trained) == list(range(1, 21))
    assert_balanced(warm, second)


@pytest.mark.parametrize("step", [3, 10])
def test_a_trainer_that_is_stopped_in_a_warm_start_commits_it(warm, step):
    trainer = warm.trainer()
    take = trainer.learner.warm_step

    def stop_at(minibatch):
        if trainer.learner.num_warm_steps == step - 1:
            trainer.stop()
        return take(minibatch)

    trainer.learner.warm_step = stop_at
    assert trainer.run() is False
    assert warm.trainer(resume=True).learner.num_warm_steps == step
