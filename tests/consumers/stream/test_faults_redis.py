"""Redis loses data: the trainer restores it, has lost work done again, and trains nothing twice."""

import threading
import time

import pytest

import penstock.consumers.__main__ as entry
import penstock.consumers.stream.recovery as recovery_module
import penstock.consumers.trainer as trainer_module
from mini_producer import group_fields
from penstock.consumers.stream.evaluation import Evaluator
from penstock.schemas.weights.codec import ChunkError
from penstock.schemas.weights.reading import WeightReader
from real_server import at_free_port
from scripted_learner import KilledError
from trainer_bench import assert_settled_once, at_step, tracebacks
from trainer_thread import TrainerThread
from waiting import wait_for

pytestmark = pytest.mark.redis


@pytest.mark.parametrize("step", [0, 3, 6, 11])
def test_a_redis_emptied_during_a_step_is_restored(bench, redis_client, caplog, step):
    producer = bench.resilient_producer()
    trainer = bench.trainer()
    at_step(trainer, step, redis_client.flushall)
    assert trainer.run()
    assert producer.problem is None
    assert_settled_once(bench, redis_client)
    assert [line["update"] for line in bench.lines("evaluations.jsonl")] == [0, 5, 10, 12]
    assert "redis has nothing of the run: restoring epoch 0" in caplog.text
    assert not tracebacks(caplog)


def test_a_redis_emptied_while_the_trainer_waits_is_restored(bench, redis_client):
    flushed = []

    def answer(index: int, version: int) -> dict:
        if index == 21 and not flushed:
            # No command of the trainer's fails here: prompts, groups and policy are simply gone.
            flushed.append(redis_client.flushall())
        return group_fields(index, version)

    bench.resilient_producer(answer)
    assert bench.trainer().run()
    assert flushed
    assert_settled_once(bench, redis_client)


def test_a_redis_emptied_again_and_again_costs_work_and_nothing_else(bench, redis_client):
    stop = threading.Event()

    def empty() -> None:
        while not stop.wait(0.1) and len(flushes) < 6:
            redis_client.flushall()
            flushes.append(1)

    flushes: list[int] = []
    bench.resilient_producer()
    trainer = bench.trainer()
    train = trainer.learner.step
    trainer.learner.step = lambda batch: (time.sleep(0.05), train(batch))[1]
    thread = threading.Thread(target=empty)
    thread.start()
    assert trainer.run()
    stop.set()
    thread.join()
    trained = trainer.learner.trained
    assert sorted(trained) == list(range(1, 49))
    assert len(flushes) >= 1


@pytest.mark.parametrize("harm", ["lost", "other bytes"])
@pytest.mark.parametrize("when", ["training", "the last evaluation"])
def test_chunks_that_are_lost_or_wrong_are_written_again_while_nobody_can_load_them(
    bench, redis_client, caplog, monkeypatch, harm, when
):
    monkeypatch.setattr(trainer_module, "WAITING_LOG_S", 0.1)
    monkeypatch.setattr(recovery_module, "SUSPICIOUS_S", 0.2)
    caplog.set_level("INFO")
    is_stuck, collect = threading.Event(), Evaluator.collect
    producer = bench.resilient_producer() if when == "the last evaluation" else None
    if when == "the last evaluation":
        monkeypatch.setattr(Evaluator, "collect", lambda self: [] if is_stuck.is_set() else collect(self))
    trainer = bench.trainer()
    if producer is None:
        thread = TrainerThread(trainer)
        wait_for(lambda: redis_client.xlen(bench.keys.policy))
    else:
        is_stuck.set()
        thread = TrainerThread(trainer)
        wait_for(lambda: "waiting for the last evaluation" in caplog.text)
    trainer.publisher.wait()
    for key, chunk in redis_client.hgetall(bench.keys.chunks).items():
        redis_client.hdel(bench.keys.chunks, key)
        if harm == "other bytes":
            redis_client.hset(bench.keys.chunks, key, chunk[:-1] + b"?")
    wait_for(lambda: "is announced again: the log has lost it, or chunks on the way to it" in caplog.text)
    reader = WeightReader(lambda command: command(redis_client), bench.keys)

    def can_be_read() -> bool:
        try:
            log = reader.log()
            reader.write(log.chain(max(log.announced)), bench.folder / "policy.safetensors")
        except (OSError, ChunkError):
            return False
        return True

    wait_for(can_be_read)
    is_stuck.clear()
    if producer is None:
        bench.resilient_producer()
    thread.join(60)
    assert thread.outcome is True


def test_a_redis_emptied_before_the_last_evaluation_is_answered_is_asked_again(bench, redis_client):
    bench.resilient_producer()
    trainer = bench.trainer()
    collect = trainer.evaluator.collect
    flushed = []

    def collect_late():
        if 12 in trainer.evaluator.pending and not flushed:
            flushed.append(redis_client.flushall())
        return collect()

    trainer.evaluator.collect = collect_late
    assert trainer.run()
    assert flushed and bench.lines("evaluations.jsonl")[-1]["update"] == 12
    assert_settled_once(bench, redis_client)


def test_what_is_restored_tells_forks_checkpoint_and_release_cursor(bench, redis_client, monkeypatch):
    bench.resilient_producer()
    first = bench.trainer()
    first.learner.fail_at[6] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    second = bench.trainer(resume=True)
    seen = {}

    def compare() -> None:
        second.publisher.wait()  # policies are announced, and announced again, beside the training
        seen["before"] = redis_client.hgetall(bench.keys.commit)
        redis_client.flushall()
        second.recovery.check()
        monkeypatch.setattr("penstock.consumers.stream.leadership.CHECK_S", 0.0)
        second.recovery.check()
        second.publisher.wait()
        seen["after"] = redis_client.hgetall(bench.keys.commit)

    at_step(second, 9, compare)
    assert second.run()
    before, after = seen["before"], seen["after"]
    # Epoch 0 was announced up to policy 6; the checkpoint of the second trainer's own is policy 1000000004.
    assert before[b"announced:0"] == b"6" and before[b"fork:1"] == b"4"
    assert before[b"checkpoint"].startswith(b"1000000004-")
    assert after == before
    assert_settled_once(bench, redis_client)


def test_a_redis_emptied_between_two_trainers_is_continued_from_the_newest_checkpoint(bench, redis_client):
    bench.resilient_producer()
    first = bench.trainer()
    first.learner.fail_at[10] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    redis_client.flushall()
    second = bench.trainer(resume=True)
    assert (second.learner.num_steps, second.leadership.scripts.epoch) == (8, 1)
    assert second.run()
    assert_settled_once(bench, redis_client)


def test_a_redis_emptied_under_a_sleeping_trainer_does_not_give_it_the_run_back(bench, redis_client):
    first = bench.trainer()
    second = bench.trainer(resume=True)
    redis_client.flushall()
    with pytest.raises(entry.FencedError, match="of epoch 0, and the checkpoint folder knows epoch 1"):
        first.run()
    bench.resilient_producer()
    assert second.run()
    assert_settled_once(bench, redis_client)


@pytest.mark.parametrize("arguments", [(), ("--appendfsync", "everysec"), ("--appendonly", "no")])
def test_a_redis_killed_during_a_step_and_started_again_is_noticed(bench, start_server, caplog, arguments):
    # An idle connection that breaks is replaced by redis-py without any error.
    server = start_server(*arguments)
    bench.url = server.url
    bench.resilient_producer()
    trainer = bench.trainer()
    at_step(trainer, 5, server.restart)
    assert trainer.run()
    assert_settled_once(bench, server.client)
    assert "redis is another process now" in caplog.text
    assert not tracebacks(caplog)
    bench.close()


@pytest.mark.parametrize(("kept", "lost"), [(2, 4), (3, 9), (0, 7)])
def test_a_power_loss_that_takes_the_last_seconds_is_made_good(bench, start_server, kept, lost):
    # The log is cut back over checkpoints that were committed, and over policies that producers sampled from.
    server = start_server("--appendfsync", "everysec")
    bench.url = server.url
    bench.overrides = ["checkpoint.every=2"]
    bench.resilient_producer()
    trainer = bench.trainer()

    at_step(trainer, lost, server.restart)
    at_step(trainer, kept, server.remember)
    assert trainer.run()
    assert server.mark is not None
    assert_settled_once(bench, server.client)
    bench.close()


def test_a_trainer_killed_with_the_power_continues_from_what_both_still_know(bench, start_server):
    server = start_server("--appendfsync", "everysec")
    bench.url = server.url
    bench.overrides = ["checkpoint.every=2"]
    bench.resilient_producer()
    first = bench.trainer()
    at_step(first, 3, server.remember)
    first.learner.fail_at[9] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    server.restart()  # its pointer names a checkpoint that was deleted since
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 8
    assert second.run()
    assert_settled_once(bench, server.client)
    bench.close()


def test_a_promoted_replica_that_lacks_the_last_updates_is_reconciled(bench, start_server, caplog):
    primary, replica = at_free_port(lambda port: start_server("--port", str(port))), start_server()
    replica.client.replicaof("127.0.0.1", primary.client.config_get("port")["port"])
    wait_for(lambda: replica.client.info("replication")["master_link_status"] == "up")
    bench.url = primary.url
    bench.overrides = ["checkpoint.every=3"]
    with bench.proxy() as proxy:
        trainer = bench.trainer(url=proxy.url)
        bench.resilient_producer(url=proxy.url)

        def demote() -> None:
            proxy.point_to(replica.url)  # which still is one: it refuses every write
            threading.Timer(0.5, replica.client.replicaof, ("NO", "ONE")).start()

        def fall_behind() -> None:
            assert primary.client.wait(1, 60_000) == 1
            replica.client.replicaof("127.0.0.1", "1")  # nobody is there: it keeps what it has
            at_step(trainer, 8, demote)

        at_step(trainer, 4, fall_behind)
        assert trainer.run()
        bench.close()
    assert_settled_once(bench, replica.client)
    assert int(primary.client.hget(bench.keys.commit, "policy_version")) <= 9, "the run went on at the replica"
    assert "redis is another process now" in caplog.text
    assert not tracebacks(caplog)
