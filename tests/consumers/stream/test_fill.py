"""Batches filled with groups whose rewards differ: what is skipped is settled, counted, bounded, and starves nobody."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from mini_producer import group_fields, make_group
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.advantages import has_variance
from penstock.consumers.observe.run_log import by_environment
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.release import Releaser
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.config import (
    AdvantageConfig,
    BatchConfig,
    EnvironmentConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from penstock.schemas.record_reader import Record
from trainer_bench import assert_balanced, tasks_taken

FILL = "batch.fill=with_variance"
pytestmark = pytest.mark.redis


def varied(index: int) -> bool:
    """True of one index in three."""
    return index % 3 == 0


def answer(index: int, version: int) -> dict:
    return group_fields(index, version, rewards=(0.0, float(varied(index))))


def never(index: int, version: int) -> dict:
    return group_fields(index, version, rewards=(0.0, 0.0))


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_every_batch_is_full_of_groups_that_teach_and_the_others_are_skipped(bench, redis_client, mode):
    bench.overrides = [FILL, f"mode={mode}"]
    bench.producer(answer)
    trainer = bench.trainer()
    taken = tasks_taken(trainer)
    assert trainer.run()
    assert_balanced(bench, trainer)
    assert len(taken) == 48 and all(map(varied, taken))
    ledger = trainer.intake.ledger
    assert set(ledger.by_outcome["trained"]) == set(taken)
    assert not any(map(varied, ledger.by_outcome["skipped"]))
    lines = bench.lines("updates.jsonl")
    skipped = sum(line["fill_skipped_groups"] for line in lines)
    assert skipped == ledger.count("skipped") - trainer.progress.passed.count > 48
    assert sum(line["environments"]["main"]["num_groups_skipped"] for line in lines) == skipped
    assert sum(line["fill_skipped_tokens"] for line in lines) > skipped
    assert bench.metrics.registry.get_sample_value("penstock_fill_skipped_groups_total") == skipped
    trainer.close()
    record = Record(bench.folder)
    recorded = Counter(entry.outcome for at in record.batches for entry in record.batch(at)[0].groups)
    assert recorded == {"trained": 48, "skipped": ledger.count("skipped")}, "none of them twice"


def test_a_batch_that_has_skipped_enough_takes_what_arrives(bench, redis_client):
    bench.overrides = [FILL, "batch.max_skipped=6"]
    bench.producer(never)
    trainer = bench.trainer()
    assert trainer.run()
    assert_balanced(bench, trainer)
    assert [line["fill_skipped_groups"] for line in bench.lines("updates.jsonl")] == [6] * 12
    assert trainer.intake.ledger.count("skipped") >= 12 * (6 + 4)


def test_a_run_that_was_stopped_while_it_filled_a_batch_goes_on_with_that_batch(bench, redis_client):
    bench.overrides = [FILL, "mode=synchronous", "batch.max_skipped=6"]
    first = bench.trainer()

    def stop_and_answer(index: int, version: int) -> dict:
        if index == 25:  # released when 21 to 24 were skipped
            first.stop()
        return never(index, version)

    bench.producer(stop_and_answer)
    before = tasks_taken(first)
    assert not first.run()
    assert len(first.intake.ledger.by_outcome["trained"]) == 0 and len(before) == 8
    second = bench.trainer(resume=True)
    after = tasks_taken(second)
    assert second.run()
    assert_balanced(bench, second)
    in_order = [10 * batch + n for batch in range(12) for n in (7, 8, 9, 10)]
    assert [*before, *after] == in_order, "6 of each 10 are skipped"
    lines = bench.lines("updates.jsonl")
    assert [line["fill_skipped_groups"] for line in lines] == [6] * 12
    assert [line["fill_skipped_tokens"] for line in lines] == [6 * 2 * 3] * 12
    assert {line["environments"]["main"]["num_groups_skipped"] for line in lines} == {6 + 4}


def test_an_environment_whose_groups_were_all_skipped_is_logged_beside_those_of_the_batch():
    trained = replace(make_group(1, 0), environment="sums")
    measured = {"sums": {"lag_mean": 2.0, "chi2": math.inf}}
    found = by_environment([trained], SimpleNamespace(teaches=lambda _: True, environments=measured), {"words": 2})
    assert found["words"] == {"num_groups_trained": 0, "num_groups_skipped": 2}
    assert found["sums"]["lag_mean"] == 2.0 and "chi2" not in found["sums"], "JSON has no infinity"
    assert found["sums"]["reward"] == 0.5 and found["sums"]["num_groups_skipped"] == 0


def test_the_credit_grows_with_what_is_skipped_and_no_further_than_the_cap():
    batch = BatchConfig(fill="with_variance", max_skipped=8)
    environment = EnvironmentConfig(path="a:B")
    config = RunConfig(name="r", groups_per_batch=4, model=ModelConfig(path="m"), environment=environment, batch=batch)
    reader, progress = SimpleNamespace(ready=()), SimpleNamespace(skipped_share=0.0)
    releaser = Releaser(None, Ledger(), reader, config, progress)  # type: ignore[arg-type]
    for share, ready, credit in ((0.0, 0, 12), (0.25, 0, 16), (0.5, 0, 24), (0.9, 0, 36), (0.5, 8, 16), (0.5, 99, 12)):
        progress.skipped_share, reader.ready = share, range(ready)
        assert releaser.credit == credit, "12 groups that teach are expected among them, those that are ready for sure"


def test_a_reward_that_the_limit_replaces_counts_as_it_is_trained_on():
    group = make_group(1, 0, rewards=(0.5, 0.5))
    (segment,) = group.rollouts[0].segments
    cut = replace(group.rollouts[0], segments=(replace(segment, finish_reason="length"),))
    group = replace(group, rollouts=(cut, group.rollouts[1]))
    assert not has_variance(group, AdvantageConfig())
    assert has_variance(group, AdvantageConfig(truncated="penalize", truncated_reward=0.0))
    assert not has_variance(group, AdvantageConfig(truncated="penalize", truncated_reward=0.5))


def test_siblings_of_equal_rewards_and_different_parts_teach_where_advantages_are_of_the_parts():
    group = make_group(1, 0, rewards=(1.0, 1.0))
    parts = ({"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0})
    rollouts = [
        replace(each, reward=replace(each.reward, parts=own)) for each, own in zip(group.rollouts, parts, strict=True)
    ]
    group = replace(group, rollouts=tuple(rollouts))
    per_component = "penstock.consumers.learning.advantages:per_component"
    for weights, varies in (
        ({"right": 1.0, "short": 0.5}, True),
        ({"right": 1.0, "short": 0.0}, True),
        ({"elsewhere": 1.0}, False),
        ({"right": 0.0, "elsewhere": 1.0}, False),
    ):
        by_parts = AdvantageConfig(path=per_component, kwargs={"weights": weights})
        assert has_variance(group, by_parts) is varies, weights
    assert not has_variance(group, AdvantageConfig())


def test_each_index_is_released_for_the_policy_that_will_take_it():
    """A producer's policy must be within the lag bound of that one, so that what waits behind two batches is sampled by
    the newest policy, not by one that is as old as the bound allows already."""
    environment, trainer = EnvironmentConfig(path="a:B"), TrainerConfig(num_minibatches=2)
    config = RunConfig(
        name="r", groups_per_batch=4, model=ModelConfig(path="m"), environment=environment, trainer=trainer, max_lag=4
    )
    ledger, released = Ledger(), []
    scripts = SimpleNamespace(
        release=lambda after, tasks, version: released.extend([version] * len(tasks)),
        release_again=lambda version, tasks: released.extend([version] * len(tasks)),
    )
    reader, progress = SimpleNamespace(ready={}), RunProgress(0, CheckpointState(policy_version=-1))
    releaser = Releaser(scripts, ledger, reader, config, progress)  # type: ignore[arg-type]
    releaser.release(10)
    assert released == [10] * 4 + [12] * 4 + [14] * 4
    for index in range(1, 5):
        ledger.settle(index, "trained")
    releaser.release(12)
    assert released[12:] == [16] * 4, "behind two batches of two steps each"
    releaser.postpone([7], "lost")
    releaser.release(12)
    assert released[16:] == [16]
    progress.skipped_share = 0.5
    for index in (5, 6, 8, 9):
        ledger.settle(index, "skipped")
    releaser.release(12)
    assert released[17:21] == [14] * 4, "half of the eight open groups will be skipped, and take no batch"
