"""The trainer's loop on a real server: every released index is settled once, whatever happens to the trainer."""

import json
import threading
from dataclasses import replace

import pytest

import penstock.consumers.__main__ as entry
from mini_producer import dead_fields, group_fields
from penstock.consumers.stream.ledger import RunFailedError
from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Field, Keys
from penstock.schemas.model_digest import model_digest
from penstock.schemas.policy import VERSIONS_PER_EPOCH
from penstock.schemas.rollout import decode_group
from penstock.schemas.weights.log import read_log
from real_server import RealServer
from scripted_learner import KilledError
from trainer_bench import assert_balanced

pytestmark = pytest.mark.redis


def test_a_run_trains_every_released_group_once_and_ends(bench, redis_client):
    trainer = bench.trainer()
    bench.producer()
    bench.producer()
    assert trainer.run()
    ledger = bench.ledger()
    assert ledger["num_updates"] == 12
    assert ledger["num_groups_released"] == ledger["num_groups_trained"] == 48
    assert ledger["num_groups_cancelled"] == 0
    assert sorted(trainer.learner.trained) == list(range(1, 49))
    assert_balanced(bench, trainer)
    assert redis_client.hget(Keys("test").commit, "finished") == b"1"
    assert redis_client.xlen(Keys("test").rollouts) == 0, "the last checkpoint acknowledged everything"
    assert json.loads((bench.folder / "model" / "trained.json").read_text()) == trainer.learner.trained
    updates = bench.lines("updates.jsonl")
    assert [line["update"] for line in updates] == list(range(1, 13))
    assert max(int(lag) for line in updates for lag in line["lag_histogram"]) <= 2
    evaluations = bench.lines("evaluations.jsonl")
    assert evaluations[0]["policy_version"] == 0 and evaluations[-1]["policy_version"] == 12
    assert [line["num_prompts"] for line in evaluations] == [3] * len(evaluations)
    assert [line["update"] for line in evaluations] == [0, 5, 10, 12]


def test_metrics_count_what_the_ledger_counts(bench):
    trainer = bench.trainer()
    bench.producer()
    trainer.run()
    value = bench.metrics.registry.get_sample_value
    assert value("penstock_groups_settled_total", {"outcome": "trained"}) == 48
    assert value("penstock_updates_total") == 12
    assert value("penstock_token_lag_steps_count") == value("penstock_tokens_trained_total") == 48 * 6
    assert value("penstock_policy_version") == 12
    assert value("penstock_evaluation_reward") == 1.0


@pytest.mark.parametrize("at", [0, 3, 4, 9])
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
    ledger = bench.ledger()
    assert ledger["num_updates"] == 12
    assert isinstance(ledger["num_tokens_trained"], int)


def test_lag_after_a_rollback_counts_the_steps_through_the_fork(bench):
    bench.overrides = ["max_lag=20", "checkpoint.every=4"]
    bench.producer()
    first = bench.trainer()
    first.learner.fail_at[7] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    second = bench.trainer(resume=True)
    assert second.run()
    # Groups of policies 5 to 7, lost with the kill, are trained by the second trainer: 3 steps back, then forward.
    assert max(lag for histogram in second.learner.lags for lag in histogram) > 3
    assert_balanced(bench, second)


def test_a_trainer_that_is_fenced_can_neither_publish_nor_commit(bench):
    bench.producer()
    first = bench.trainer()
    first.learner.fail_at[2] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    bench.trainer(resume=True)
    with pytest.raises(entry.FencedError, match="this trainer is of epoch 0, the run is in epoch 1"):
        first.run()


def test_a_stopped_trainer_commits_and_is_continued(bench):
    bench.producer()
    first = bench.stopped_at(6)
    steps = first.learner.num_steps
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == steps, "what was trained before the stop is in its checkpoint"
    assert second.run()
    assert_balanced(bench, second)


def test_groups_without_variance_are_skipped_and_fill_their_batch(bench):
    bench.producer(lambda index, version: group_fields(index, version, rewards=(1.0, float(index % 3 > 0))))
    trainer = bench.trainer()
    assert trainer.run()
    ledger = bench.ledger()
    assert ledger["num_updates"] == 12
    assert ledger["num_groups_released"] == 48
    assert ledger["num_groups_skipped"] == sum(index % 3 > 0 for index in range(1, 49))
    assert_balanced(bench, trainer)


def test_a_batch_without_any_variance_trains_nothing_and_the_run_still_ends(bench):
    bench.producer(lambda index, version: group_fields(index, version, rewards=(1.0, 1.0)))
    trainer = bench.trainer()
    assert trainer.run()
    assert trainer.policy.version == 0
    assert bench.ledger()["num_groups_skipped"] == 48
    assert {line["skipped_reason"] for line in bench.lines("updates.jsonl")} == {"nothing left to train"}


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


def test_a_step_that_is_not_finite_marks_its_groups_dead_and_never_reaches_the_policy(bench, redis_client):
    bench.producer()
    trainer = bench.trainer()
    trainer.learner.fail_at[5] = "gradient norm is not finite"
    assert trainer.run()
    ledger = bench.ledger()
    assert (ledger["num_groups_trained"], ledger["num_groups_dead"], ledger["num_steps_skipped"]) == (48, 4, 1)
    assert trainer.policy.version == 12
    assert redis_client.xlen(Keys("test").dead) == 4
    assert_balanced(bench, trainer)


def test_groups_of_a_mini_batch_that_is_not_finite_die_while_the_rest_of_their_batch_is_trained(bench, redis_client):
    bench.producer()
    trainer = bench.trainer()
    trainer.learner.never_finite = {6, 7, 20}
    assert trainer.run()
    ledger = bench.ledger()
    assert (ledger["num_groups_trained"], ledger["num_groups_dead"]) == (45, 3)
    assert {6, 7, 20}.isdisjoint(trainer.learner.trained)
    letters = [fields for _, fields in redis_client.xrange(Keys("test").dead)]
    assert {decode_group(letter[Field.PAYLOAD]).index for letter in letters} == {6, 7, 20}
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
    assert_balanced(bench, trainer)


def test_a_run_in_which_every_step_fails_stops_and_keeps_what_it_had_trained(bench):
    bench.producer()
    trainer = bench.trainer()

    class Failing(dict):
        def pop(self, step, default=None):
            return "loss is not finite" if step >= 3 else None

    trainer.learner.fail_at = Failing()
    with pytest.raises(RunFailedError, match="8 optimizer steps in a row failed; the last one: loss is not finite"):
        trainer.run()
    ledger = bench.ledger()
    assert (ledger["num_updates"], ledger["num_groups_trained"], ledger["num_groups_dead"]) == (3, 12, 32)
    assert bench.trainer(resume=True).learner.num_steps == 3


def test_synchronous_mode_trains_every_token_at_lag_zero(bench):
    bench.overrides = ["mode=synchronous"]
    bench.producer()
    trainer = bench.trainer()
    assert trainer.run()
    assert {lag for histogram in trainer.learner.lags for lag in histogram} == {0}


def test_a_batch_is_in_the_order_of_its_indexes_whatever_the_order_of_arrival(bench):
    bench.overrides = ["mode=synchronous"]
    producer = bench.producer()
    serve = producer._serve
    producer._serve = lambda stream, entries: serve(stream, entries[::-1])
    trainer = bench.trainer()
    assert trainer.run()
    assert trainer.learner.trained == list(range(1, 49))


def test_a_run_name_that_exists_is_refused_without_resume(bench):
    bench.trainer()
    with pytest.raises(ConfigError, match="name = 'test': this run exists; continue it with --resume"):
        bench.trainer()


def test_redis_killed_and_started_again_mid_run_loses_nothing(bench, server_binary):
    server = RealServer(server_binary)
    bench.url = server.url
    enough = threading.Event()

    def answer(index: int, version: int) -> dict:
        if index > 20:
            enough.set()
        return group_fields(index, version)

    try:
        trainer = bench.trainer()
        producer = bench.producer(answer)
        thread = threading.Thread(target=trainer.run)
        thread.start()
        assert enough.wait(60)
        server.stop()
        producer.join()
        server.start()
        bench.producer()
        thread.join(90)
        assert not thread.is_alive()
        assert sorted(trainer.learner.trained) == list(range(1, 49))
        assert_balanced(bench, trainer)
    finally:
        bench.close()
        server.remove()


def test_a_torn_line_of_telemetry_stays_a_line_of_its_own(bench):
    folder = bench.runs / "test"
    folder.mkdir()
    (folder / "updates.jsonl").write_text('{"update": 1}\n{"upd')
    bench.producer()
    assert bench.trainer().run()
    lines = (folder / "updates.jsonl").read_text().splitlines()
    assert lines[:2] == ['{"update": 1}', '{"upd']
    assert [json.loads(line)["update"] for line in lines[2:]] == list(range(1, 13))


def test_a_run_without_held_out_prompts_evaluates_nothing_and_ends(bench):
    bench.overrides = ["evaluation.num_prompts=0"]
    bench.producer()
    assert bench.trainer().run()
    assert bench.lines("evaluations.jsonl") == []


def test_the_policies_of_an_adapter_name_its_base(bench, redis_client, model_folder):
    bench.overrides = ["lora={}", f"model.path={json.dumps(str(model_folder))}"]
    trainer = bench.trainer()
    trainer.policy.publish_first()
    trainer.publisher.wait()
    announced = read_log(redis_client, bench.keys).announced
    assert [manifest.base_digest for manifest in announced.values()] == [model_digest(model_folder)]
