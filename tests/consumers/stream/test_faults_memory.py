"""Redis at its memory limit, and a stream that nobody trains from."""

import threading
import time

import pytest

import penstock.consumers.trainer
from mini_producer import group_fields
from penstock.schemas.keys import PRODUCERS_GROUP
from penstock.schemas.policy import VERSIONS_PER_EPOCH
from trainer_bench import assert_settled_once, at_step
from trainer_thread import TrainerThread
from waiting import wait_for

pytestmark = pytest.mark.redis


def test_producers_refused_for_want_of_memory_go_on_once_the_trainer_has_committed_early(
    bench, start_server, monkeypatch
):
    server = start_server()
    used = server.client.info("memory")["used_memory"]
    # Room for some 30 groups; the credit alone lets 12 wait, and the run makes 96.
    server.client.config_set("maxmemory", used + 3_500_000)
    bench.url = server.url
    bench.overrides = ["num_updates=24", "checkpoint.every=1000", "evaluation.num_prompts=0"]
    payload = {"padding": b"x" * 100_000}
    producer = bench.resilient_producer(lambda index, version: {**group_fields(index, version), **payload})
    monkeypatch.setattr(
        "penstock.consumers.stream.commit_schedule.MEMORY_HIGH", 1e9
    )  # as if the last commit had been just too early
    trainer = bench.trainer()

    def watch() -> None:
        wait_for(lambda: producer.num_pauses > 3)
        monkeypatch.setattr("penstock.consumers.stream.commit_schedule.MEMORY_HIGH", 0.7)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert trainer.run()
    watcher.join()
    assert producer.problem is None
    assert_settled_once(bench, server.client)
    bench.close()


def test_a_commit_is_due_at_seventy_percent_of_the_memory_and_producers_never_wait(bench, start_server):
    server = start_server()
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + 6_000_000)
    bench.url = server.url
    bench.overrides = ["num_updates=60", "checkpoint.every=1000", "evaluation.num_prompts=0"]
    payload = {"padding": b"x" * 100_000}
    producer = bench.resilient_producer(lambda index, version: {**group_fields(index, version), **payload})
    trainer = bench.trainer()
    assert trainer.run()
    assert producer.num_pauses == 0
    assert trainer.learner.num_steps == 60
    assert_settled_once(bench, server.client)
    bench.close()


def test_at_the_memory_limit_prompts_that_nobody_can_get_are_released_again(bench, start_server, monkeypatch, caplog):
    monkeypatch.setattr(penstock.consumers.trainer, "WAITING_LOG_S", 1.0)
    server = start_server()
    bench.url = server.url
    bench.overrides = ["evaluation.num_prompts=0"]
    thread = TrainerThread(bench.trainer())
    prompts = bench.keys.prompts
    wait_for(lambda: server.client.xlen(prompts) == 12)
    server.client.xgroup_create(prompts, PRODUCERS_GROUP, id="0")
    [(_, entries)] = server.client.xreadgroup(PRODUCERS_GROUP, "broken", {prompts: ">"}, count=5)
    server.client.config_set("maxmemory", 1)
    server.client.xack(prompts, PRODUCERS_GROUP, *(entry for entry, _ in entries[:3]))
    wait_for(lambda: "3 entries that no producer can get any more are removed" in caplog.text)
    wait_for(lambda: server.client.xlen(prompts) == 12)
    server.client.config_set("maxmemory", 0)
    bench.resilient_producer()
    thread.join(60)
    assert thread.outcome is True
    assert_settled_once(bench, server.client)
    bench.close()


def test_memory_that_no_commit_can_free_is_no_reason_to_commit_all_the_time(bench, redis_client, monkeypatch):
    monkeypatch.setattr("penstock.consumers.stream.commit_schedule.MEMORY_HIGH", 0.0)  # somebody else's data
    monkeypatch.setattr("penstock.consumers.stream.commit_schedule.MEMORY_COMMIT_SHARE", 0.001)
    bench.overrides = ["checkpoint.every=1000"]
    bench.resilient_producer()
    trainer = bench.trainer()
    written = []
    begin = trainer.leadership.checkpoints.begin
    trainer.leadership.checkpoints.begin = lambda *args: (written.append(1), begin(*args))[1]
    assert trainer.run()
    assert len(written) < 12, "fewer than one for each update"


def test_the_backlog_stays_at_the_credit_while_no_trainer_runs(bench, redis_client):
    producers = [bench.resilient_producer(), bench.resilient_producer()]
    first = bench.trainer()
    at_step(first, 5, first.stop)
    assert first.run() is False
    wait_for(lambda: redis_client.xlen(bench.keys.prompts) == 0)
    answered = sum(producer.num_answered for producer in producers)
    time.sleep(0.5)
    assert sum(producer.num_answered for producer in producers) == answered
    assert redis_client.xlen(bench.keys.rollouts) == bench.config.credit == 12
    second = bench.trainer(resume=True)
    assert second.leadership.scripts.epoch == 1 and second.policy.version == VERSIONS_PER_EPOCH
    assert second.run()
    assert_settled_once(bench, redis_client)
