"""Ways in which the ledger and the saved policy, or the ledger and the streams, could come apart."""

import shutil
import threading
from collections import Counter

import pytest

import penstock.consumers.trainer
from mini_producer import dead_fields, group_fields
from penstock.consumers.learning.step_report import StepReport
from penstock.consumers.stream.checkpoints import CheckpointError
from penstock.consumers.stream.ledger import RunFailedError
from penstock.consumers.stream.scripts import FencedError
from penstock.schemas.keys import PRODUCERS_GROUP
from scripted_learner import KilledError
from trainer_bench import assert_settled_once, at_step
from trainer_thread import TrainerThread
from waiting import wait_for

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]

NOT_FINITE = "loss is not finite"


def failed_report(batch, indexes) -> StepReport:
    """Returns the learner's report of a batch without any step."""
    return StepReport(
        metrics={"reward": 0.0, "loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0},
        lag_histogram=batch.lag_histogram,
        num_tokens_trained=batch.num_tokens_trained,
        num_tokens_masked_lag=0,
        advantages=batch.group_advantages,
        skipped_reason=NOT_FINITE,
        failed=dict.fromkeys(indexes, NOT_FINITE),
    )


def test_a_run_that_gives_up_has_settled_all_that_its_policy_was_trained_on(bench, redis_client):
    bench.resilient_producer()
    first = bench.trainer()
    train, calls = first.learner.step, []

    def step(batch):
        calls.append(batch)
        if 3 < len(calls) <= 10:
            return failed_report(batch, batch.indexes)
        if len(calls) == 11:  # the eighth failure in a row, but for the three groups that are trained
            first.learner.never_finite = {batch.indexes[0]}
        if len(calls) > 11:
            return failed_report(batch, batch.indexes)
        return train(batch)

    first.learner.step = step
    with pytest.raises(RunFailedError, match="8 optimizer steps in a row failed"):
        first.run()
    assert len(calls) == 19, "a batch with some step in it has not failed"
    second = bench.trainer(resume=True)
    assert second.run()
    twice = [index for index, count in Counter(bench.saved_training(redis_client)).items() if count > 1]
    assert not twice


def test_groups_that_a_failed_batch_is_not_to_blame_for_stay_ready(bench, redis_client):
    bench.overrides = ["max_lag=0", "evaluation.num_prompts=0"]
    bench.resilient_producer()
    trainer = bench.trainer()
    train, failed = trainer.learner.step, []

    def step(batch):
        if trainer.learner.num_steps == 2 and not failed:
            failed.extend(batch.indexes[2:])
            return failed_report(batch, failed)
        return train(batch)

    trainer.learner.step = step
    assert trainer.run()
    assert_settled_once(bench, redis_client, dead=set(failed))


def test_a_fenced_trainer_leaves_the_checkpoint_that_its_lost_commit_reply_was_about(bench, redis_client):
    bench.resilient_producer()
    with bench.proxy() as proxy:
        held = proxy.hold("commit", 1, "reply")
        first = TrainerThread(bench.trainer(url=proxy.url))
        held.wait()
        second = bench.trainer(resume=True)
        assert second.learner.num_steps == 4
        pointer = redis_client.hget(bench.keys.commit, "checkpoint").decode()
        proxy.cut_all()  # the reply is lost; the first asks again, and is fenced
        held.release()
        first.join(60)
        assert isinstance(first.outcome, FencedError)
    assert (bench.folder / "checkpoints" / pointer).is_dir()
    second.learner.fail_at[5] = KilledError()
    with pytest.raises(KilledError):
        second.run()
    third = bench.trainer(resume=True)
    assert third.learner.num_steps == 4
    assert third.run()
    assert_settled_once(bench, redis_client)


def test_a_resume_that_finds_no_checkpoint_where_one_was_committed_is_refused(bench, redis_client):
    bench.resilient_producer()
    first = bench.trainer()
    first.learner.fail_at[10] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    pointer = redis_client.hget(bench.keys.commit, "checkpoint").decode()
    checkpoints = bench.folder / "checkpoints"
    shutil.move(checkpoints / pointer, bench.folder / "elsewhere")
    for other in checkpoints.glob("*-*"):
        if other.is_dir():
            shutil.rmtree(other)
    with pytest.raises(CheckpointError, match=f"holds no checkpoint, but {pointer} was committed"):
        bench.trainer(resume=True)
    shutil.move(bench.folder / "elsewhere", checkpoints / pointer)
    assert bench.trainer(resume=True).run()
    assert_settled_once(bench, redis_client)


def test_a_missing_checkpoint_with_a_predecessor_is_said(bench, redis_client, caplog):
    bench.resilient_producer()
    first = bench.trainer()
    first.learner.fail_at[10] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    pointer = redis_client.hget(bench.keys.commit, "checkpoint").decode()
    shutil.rmtree(bench.folder / "checkpoints" / pointer)
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 4
    assert f"{pointer} was committed and is missing" in caplog.text
    assert second.run()
    assert_settled_once(bench, redis_client)


def test_a_continued_run_is_not_finished_again_by_a_redis_that_fell_back(bench, start_server):
    server = start_server("--appendfsync", "everysec")
    bench.url = server.url
    bench.resilient_producer()
    assert bench.trainer().run()
    server.remember()
    bench.overrides = ["num_updates=20"]
    second = bench.trainer(resume=True)
    producer = bench.resilient_producer()
    at_step(second, 14, lambda: wait_for(lambda: producer.epoch == 1) or server.restart())
    thread = TrainerThread(second)
    thread.join(60)
    assert thread.outcome is True
    assert second.learner.num_steps == 20


def test_streams_that_were_emptied_while_the_trainer_waits_are_released_again(bench, redis_client, monkeypatch):
    monkeypatch.setattr(penstock.consumers.trainer, "WAITING_LOG_S", 1.0)
    bench.overrides = ["evaluation.num_prompts=0"]
    trainer = bench.trainer()
    thread = TrainerThread(trainer)
    # The trainer has released all that its credit allows, and nothing has come back yet.
    wait_for(lambda: redis_client.xlen(bench.keys.prompts) == 12)
    redis_client.xadd(bench.keys.prompts, {"index": 1, "version": 0}, maxlen=1, approximate=False)
    bench.resilient_producer()
    thread.join(60)
    assert thread.outcome is True
    assert_settled_once(bench, redis_client)


def test_prompts_that_were_acknowledged_and_left_there_are_released_again(bench, redis_client, monkeypatch, caplog):
    monkeypatch.setattr(penstock.consumers.trainer, "WAITING_LOG_S", 1.0)
    bench.overrides = ["evaluation.num_prompts=0"]
    trainer = bench.trainer()
    thread = TrainerThread(trainer)
    wait_for(lambda: redis_client.xlen(bench.keys.prompts) == 12)
    redis_client.xgroup_create(bench.keys.prompts, PRODUCERS_GROUP, id="0")
    [(_, entries)] = redis_client.xreadgroup(PRODUCERS_GROUP, "broken", {bench.keys.prompts: ">"}, count=5)
    redis_client.xack(bench.keys.prompts, PRODUCERS_GROUP, *(entry for entry, _ in entries[:3]))
    bench.resilient_producer()
    thread.join(60)
    assert thread.outcome is True
    assert "3 entries that no producer can get any more are removed" in caplog.text
    assert redis_client.xlen(bench.keys.prompts) == 0
    assert_settled_once(bench, redis_client)


@pytest.mark.parametrize("fields", [{"foo": "bar"}, {"index": "x", "version": "0"}, {"index": "9" * 5000}])
def test_a_prompt_entry_that_names_no_task_does_not_stop_the_trainer(bench, redis_client, fields, caplog):
    trainer = bench.trainer()
    entry = redis_client.xadd(bench.keys.prompts, fields)
    thread = TrainerThread(trainer)
    wait_for(lambda: "an entry names no task" in caplog.text)
    redis_client.xdel(bench.keys.prompts, entry)  # what a producer does that claims it
    bench.resilient_producer()
    thread.join(60)
    assert thread.outcome is True
    assert_settled_once(bench, redis_client)


@pytest.mark.parametrize("evaluation", [b"9" * 5000 + b"-1", b"0-50", b"12-0", b"-", b"1-2-3"])
def test_an_evaluation_result_of_nobody_changes_nothing(bench, redis_client, evaluation):
    for _ in range(3):
        redis_client.xadd(bench.keys.evaluation_results, {"evaluation": evaluation, "kind": "dead"})
    bench.resilient_producer()
    trainer = bench.trainer()
    assert trainer.run()
    assert [line["num_failed"] for line in bench.lines("evaluations.jsonl")] == [0, 0, 0, 0]


def test_a_run_resumed_with_smaller_steps_still_releases_what_it_needs(bench, redis_client):
    bench.overrides = ["num_updates=60"]
    bench.resilient_producer()
    first = bench.trainer()
    at_step(first, 20, first.stop)
    assert first.run() is False
    bench.overrides = ["num_updates=60", "groups_per_batch=1"]
    second = bench.trainer(resume=True)
    thread = TrainerThread(second)
    thread.join(60)
    assert thread.outcome is True
    assert second.learner.num_steps == 60


def test_a_run_that_gives_up_on_dead_groups_has_settled_each_of_them(bench, redis_client):
    bench.overrides = ["trainer.max_dead_in_a_row=3", "evaluation.num_prompts=0"]
    trainer = bench.trainer()

    begun = threading.Event()

    def answer(index, version):
        if index < 9:
            return group_fields(index, version)
        begun.wait(60)
        return dead_fields(index, "reward: boom")

    def let_all_arrive():
        begun.set()
        wait_for(lambda: redis_client.xlen(bench.keys.rollouts) >= 12)

    bench.resilient_producer(answer)
    # Every answer that the credit allows is on the stream, so that one read takes more than three dead ones.
    at_step(trainer, 1, let_all_arrive)
    with pytest.raises(RunFailedError, match="max_dead_in_a_row = 3"):
        trainer.run()
    ledger = bench.ledger()
    letters = {int(index) for index in redis_client.hkeys(bench.keys.dead_index)}
    assert ledger["num_groups_dead"] == len(letters) > 3
    resumed = bench.trainer(resume=True)
    missing = set(resumed.intake.ledger.settled.missing(resumed.intake.ledger.num_released))
    on_stream = {int(fields[b"index"]) for _, fields in redis_client.xrange(bench.keys.rollouts)}
    prompts = {int(fields[b"index"]) for _, fields in redis_client.xrange(bench.keys.prompts)}
    assert missing <= on_stream | prompts
