"""The trainer's loop on a real server: every released index is settled once, whatever happens to the trainer."""

import json
from dataclasses import replace

import pytest

from mini_producer import dead_fields, group_fields
from penstock.consumers.stream.ledger import RunFailedError
from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Field, Keys
from penstock.schemas.model_digest import model_digest
from penstock.schemas.policy import VERSIONS_PER_EPOCH
from penstock.schemas.rollout import decode_group
from penstock.schemas.weights.log import read_log
from scripted_learner import KilledError
from trainer_bench import assert_balanced

pytestmark = pytest.mark.redis


def test_a_run_trains_every_released_group_once_and_ends(bench, redis_client):
    trainer = bench.trainer()
    bench.producer()
    bench.producer()
    assert trainer.run()
    ledger = bench.ledger()
    assert (ledger["num_updates"], ledger["num_groups_cancelled"]) == (12, 0)
    assert ledger["num_groups_released"] == ledger["num_groups_trained"] == 48
    assert sorted(trainer.learner.trained) == list(range(1, 49))
    assert_balanced(bench, trainer)
    assert redis_client.hget(Keys("test").commit, "finished") == b"1"
    assert redis_client.xlen(Keys("test").rollouts) == 0, "the last checkpoint acknowledged everything"
    assert json.loads((bench.folder / "model" / "trained.json").read_text()) == trainer.learner.trained
    updates = bench.lines("updates.jsonl")
    assert [line["update"] for line in updates] == list(range(1, 13))
    assert max(int(lag) for line in updates for lag in line["lag_histogram"]) <= 2
    evaluations = bench.lines("evaluations.jsonl")
    asked = [(line["update"], line["num_prompts"]) for line in evaluations]
    assert asked == [(update, 3) for update in (0, 5, 10, 12)]
    assert evaluations[0]["policy_version"] == 0 and evaluations[-1]["policy_version"] == 12
    value = bench.metrics.registry.get_sample_value
    assert value("penstock_groups_settled_total", {"outcome": "trained"}) == 48
    assert value("penstock_updates_total") == value("penstock_policy_version") == 12
    assert value("penstock_token_lag_steps_count") == value("penstock_tokens_trained_total") == 48 * 6
    assert value("penstock_evaluation_reward") == 1.0


@pytest.mark.parametrize("at", [0, 9])
def test_a_killed_trainer_is_resumed_and_nothing_is_lost_or_trained_twice(bench, at):
    bench.producer()
    first = bench.trainer()
    first.learner.fail_at[at] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == at // 4 * 4
    assert second.run()
    assert sorted(second.learner.trained) == list(range(1, 49))
    assert_balanced(bench, second)
    assert second.policy.version // VERSIONS_PER_EPOCH == 1
    assert bench.ledger()["num_updates"] == 12


def test_groups_without_variance_are_skipped_and_fill_their_batch(bench):
    bench.producer(lambda index, version: group_fields(index, version, rewards=(1.0, float(index % 3 > 0))))
    trainer = bench.trainer()
    assert trainer.run()
    ledger = bench.ledger()
    assert ledger["num_updates"] == 12
    assert ledger["num_groups_released"] == 48
    assert ledger["num_groups_skipped"] == sum(index % 3 > 0 for index in range(1, 49))
    assert_balanced(bench, trainer)


def test_dead_groups_are_replaced_and_leave_a_letter(bench, redis_client):
    bench.producer(
        lambda index, version: dead_fields(index, "reward: boom") if index in (3, 9) else group_fields(index, version)
    )
    trainer = bench.trainer()
    assert trainer.run()
    ledger = bench.ledger()
    assert (ledger["num_groups_trained"], ledger["num_groups_dead"], ledger["num_groups_released"]) == (48, 2, 50)
    letters = redis_client.xrange(Keys("test").dead)
    assert [(fields[Field.INDEX], fields[Field.REASON]) for _, fields in letters] == [
        (b"3", b"reward: boom"),
        (b"9", b"reward: boom"),
    ]
    assert_balanced(bench, trainer)


def test_a_run_in_which_everything_dies_stops_and_says_why(bench, redis_client):
    bench.overrides = ["trainer.max_dead_in_a_row=10"]
    bench.producer(lambda index, version: dead_fields(index, "reward: TypeError: no len()"))
    with pytest.raises(RunFailedError, match=r"max_dead_in_a_row = 10 .*'reward': 10.*TypeError: no len\(\)"):
        bench.trainer().run()
    num_letters = redis_client.hlen(bench.keys.dead_index)
    assert bench.ledger()["num_groups_dead"] == num_letters >= 10, "the ledger are written all the same"


def test_a_run_outlives_any_number_of_dead_groups_among_good_ones(bench):
    bench.overrides = ["trainer.max_dead_in_a_row=10"]
    bench.producer(
        lambda index, version: dead_fields(index, "prompt: long") if index % 3 == 0 else group_fields(index, version)
    )
    trainer = bench.trainer()
    assert trainer.run()
    assert bench.ledger()["num_groups_dead"] > 10
    assert_balanced(bench, trainer)


def test_stale_groups_are_sampled_again_instead_of_trained_masked(bench):
    first_time = set()

    def answer(index: int, version: int) -> dict:
        # Every fifth index claims, the first time, to be as old as policy 0.
        if index % 5 == 0 and index not in first_time:
            first_time.add(index)
            return group_fields(index, 0)
        return group_fields(index, version)

    bench.producer(answer)
    trainer = bench.trainer()
    assert trainer.run()
    ledger = bench.ledger()
    assert ledger["num_groups_released_again"]["stale"] >= 5
    assert sorted(trainer.learner.trained) == list(range(1, 49))
    assert_balanced(bench, trainer)


def test_groups_of_what_is_not_finite_die_alone_and_never_reach_the_policy(bench, redis_client):
    """A whole batch, and groups of which one is in a batch with others."""
    bench.producer()
    trainer = bench.trainer()
    trainer.learner.fail_at[5] = "gradient norm is not finite"
    trainer.learner.never_finite = {6, 7, 48}
    assert trainer.run()
    ledger = bench.ledger()
    assert (ledger["num_groups_trained"], ledger["num_groups_dead"], ledger["num_steps_skipped"]) == (45, 7, 1)
    assert {6, 7, 48}.isdisjoint(trainer.learner.trained)
    assert trainer.policy.version == 12
    letters = [fields for _, fields in redis_client.xrange(Keys("test").dead)]
    assert len(letters) == 7 and {decode_group(letter[Field.PAYLOAD]).index for letter in letters} > {6, 7, 48}
    assert all(letter[Field.ENTRY] for letter in letters)
    assert_balanced(bench, trainer)


def test_groups_that_a_failed_step_spares_are_trained_by_a_later_batch(bench, redis_client):
    bench.producer()
    trainer = bench.trainer()
    train, spared = trainer.learner.step, []

    def step(batch):
        report = train(batch)
        if spared or trainer.learner.num_steps < 3:
            return report
        spared.extend(batch.indexes[1:3])
        dead = batch.indexes[0]
        for index in (dead, *spared):
            trainer.learner.trained.remove(index)
        return replace(report, failed={dead: "loss is not finite"}, spared=frozenset(spared))

    trainer.learner.step = step
    assert trainer.run()
    ledger = bench.ledger()
    assert (ledger["num_groups_trained"], ledger["num_groups_dead"]) == (48 - 3, 1), "the batch had room for no others"
    assert [trainer.learner.trained.count(index) for index in spared] == [1, 1]
    assert_balanced(bench, trainer)


@pytest.mark.parametrize("trains_every_row", [False, True])
def test_groups_without_variance_reach_an_objective_that_asks_for_them(bench, trains_every_row):
    bench.producer(lambda index, version: group_fields(index, version, rewards=(1.0, 1.0)))
    trainer = bench.trainer()
    trainer.learner.trains_every_row = trains_every_row
    assert trainer.run()
    assert bench.ledger()["num_groups_skipped"] == 48
    assert trainer.learner.num_steps == trainer.policy.version == (12 if trains_every_row else 0)
    reason = None if trains_every_row else "nothing left to train"
    assert {line["skipped_reason"] for line in bench.lines("updates.jsonl")} == {reason}
    assert_balanced(bench, trainer)


def test_a_synchronous_batch_is_at_lag_0_and_in_the_order_of_its_indexes_whatever_the_order_of_arrival(bench):
    bench.overrides = ["mode=synchronous"]
    producer = bench.producer()
    serve = producer._serve
    producer._serve = lambda stream, entries: serve(stream, entries[::-1])
    trainer = bench.trainer()
    assert trainer.run()
    assert {lag for histogram in trainer.learner.lags for lag in histogram} == {0}
    assert trainer.learner.trained == list(range(1, 49))


def test_a_run_name_that_exists_is_refused_without_resume(bench):
    bench.trainer()
    with pytest.raises(ConfigError, match="name = 'test': this run exists; continue it with --resume"):
        bench.trainer()


def test_a_run_without_held_out_prompts_or_record_has_neither(bench):
    bench.overrides = ["evaluation.num_prompts=0", "record=false"]
    bench.producer()
    assert bench.trainer().run()
    assert bench.lines("evaluations.jsonl") == [] and not (bench.folder / "record").exists()


def test_the_policies_of_an_adapter_name_its_base(bench, redis_client, model_folder):
    bench.overrides = ["lora={}", f"model.path={json.dumps(str(model_folder))}"]
    trainer = bench.trainer()
    trainer.policy.publish_first()
    trainer.publisher.wait()
    announced = read_log(redis_client, bench.keys).announced
    assert [manifest.base_digest for manifest in announced.values()] == [model_digest(model_folder)]
