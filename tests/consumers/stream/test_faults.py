"""The named failures of the trainer, each once on a real server: see the table in CONTRIBUTING.md. What lies between
them is in test_protocol_machine.py."""

import os
import shutil
import signal
import threading
import time
from collections import Counter
from functools import partial

import msgspec
import pytest

import penstock.consumers.__main__ as entry
import penstock.consumers.stream.recovery as recovery_module
import penstock.consumers.trainer as trainer_module
from mini_producer import dead_fields, group_fields
from penstock.consumers.checkpoints import checkpoints
from penstock.consumers.checkpoints.checkpoints import CheckpointError, Checkpoints
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.ledger import RunFailedError
from penstock.schemas.keys import PRODUCERS_GROUP, Field, entry_key
from penstock.schemas.policy import VERSIONS_PER_EPOCH
from penstock.schemas.weights.codec import ChunkError
from penstock.schemas.weights.reading import WeightReader
from real_server import at_free_port
from scripted_learner import KilledError
from trainer_bench import assert_settled_once, at_step, commit_at_once, tracebacks
from trainer_thread import TrainerThread
from waiting import wait_for

pytestmark = pytest.mark.redis

NOT_FINITE = "loss is not finite"
LARGEST_ID = "18446744073709551615-18446744073709551615"


def killed_at(bench, step: int):
    """Returns a trainer that was killed in its optimizer step number `step`."""
    trainer = bench.trainer()
    trainer.learner.fail_at[step] = KilledError()
    with pytest.raises(KilledError):
        trainer.run()
    return trainer


def resumed(bench, client, continued_from: int) -> None:
    """The next trainer continues from this update, and brings the run to its end."""
    trainer = bench.trainer(resume=True)
    assert trainer.learner.num_steps == continued_from
    assert trainer.run()
    assert_settled_once(bench, client)


# Killed

PLACES = {
    # Where the second checkpoint (of update 8) meets the kill, and the update that is continued from.
    "before the checkpoint": ("begin", "before", 4),
    "with the checkpoint half written": ("copy_model_files", "after", 4),
    "between checkpoint and commit": ("_write", "after", 4),
    "after the commit": ("committed", "before", 8),
    "after the deletion of older checkpoints": ("committed", "after", 8),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_trainer_killed_around_a_commit_is_continued(bench, redis_client, monkeypatch, place):
    method, when, continued_from = PLACES[place]
    bench.producer()
    first = bench.trainer()
    owner = checkpoints if hasattr(checkpoints, method) else Checkpoints
    original, calls = getattr(owner, method), []

    def die_the_second_time(*args):
        calls.append(args)
        if len(calls) == 2 and when == "before":
            raise KilledError
        result = original(*args)
        if len(calls) == 2:
            raise KilledError
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, die_the_second_time)
        with pytest.raises(KilledError):
            first.run()
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == continued_from
    assert second.run()
    assert_settled_once(bench, redis_client)
    left = [path.name for path in (bench.folder / "checkpoints").iterdir() if path.is_dir()]
    assert len(left) == 2 and not any(name.startswith("partial") for name in left)


def test_a_resume_that_finds_no_checkpoint_where_one_was_committed_is_refused(bench, redis_client):
    bench.producer()
    killed_at(bench, 10)
    pointer = redis_client.hget(bench.keys.commit, "checkpoint").decode()
    folder = bench.folder / "checkpoints"
    shutil.move(folder / pointer, bench.folder / "elsewhere")
    for other in folder.glob("*-*"):
        if other.is_dir():
            shutil.rmtree(other)
    with pytest.raises(CheckpointError, match=f"holds no checkpoint, but {pointer} was committed"):
        bench.trainer(resume=True)
    shutil.move(bench.folder / "elsewhere", folder / pointer)
    resumed(bench, redis_client, 8)


def test_everything_a_trainer_counts_survives_in_its_checkpoint(bench, redis_client):
    bench.overrides = ["evaluation.num_prompts=0"]
    bench.producer()
    first = bench.trainer()
    first.learner.fail_at[3] = "gradient norm is not finite"
    train = first.learner.step

    def stop_and_train(batch):
        if first.learner.num_steps == 6:
            first.stop()
        return train(batch)

    first.learner.step = stop_and_train
    assert first.run() is False
    second = bench.trainer(resume=True)
    kept, left = (msgspec.structs.asdict(trainer.intake.ledger.to_state()) for trainer in (second, first))
    # What was read behind the last batch is read again.
    assert entry_key(kept.pop("last_read").encode()) <= entry_key(left.pop("last_read").encode())
    assert kept == left
    totals = second.progress.totals
    assert totals == first.progress.totals and totals["num_tokens_trained"] >= 7 * 4 * 6
    assert second.progress.num_batches == first.progress.num_batches == 7
    assert totals["num_steps_skipped"] == 1
    assert second.intake.lag_of.forks == {1: 7}
    assert second.intake.lag_of.announced[0] == 7


# Failed steps


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
    bench.producer()
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
    bench.producer()
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


# Emptied, killed and replaced servers


@pytest.mark.parametrize(
    ("harm", "when"),
    [("lost", "training"), ("other bytes", "a producer says so"), ("other bytes", "the last evaluation")],
)
def test_chunks_that_are_lost_or_wrong_are_written_again_while_nobody_can_load_them(
    bench, beat, redis_client, caplog, monkeypatch, harm, when
):
    monkeypatch.setattr(trainer_module, "WAITING_LOG_S", 0.1)
    if when == "the last evaluation":
        monkeypatch.setattr(recovery_module, "SUSPICIOUS_S", 0.2)
    caplog.set_level("INFO")
    is_stuck, collect = threading.Event(), Evaluator.collect
    producer = bench.producer() if when == "the last evaluation" else None
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
    if when == "a producer says so":
        beat(bench.keys, "late-1", unreadable_version=0)
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
        bench.producer()
    thread.join(60)
    assert thread.outcome is True
    assert caplog.text.count("producer late cannot read policy 0: its chunks are read back") == ("producer" in when)


def test_what_is_restored_tells_forks_checkpoint_and_release_cursor(bench, redis_client, monkeypatch):
    bench.producer()
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


def test_a_redis_emptied_under_a_sleeping_trainer_does_not_give_it_the_run_back(bench, redis_client):
    first = bench.trainer()
    second = bench.trainer(resume=True)
    redis_client.flushall()
    with pytest.raises(entry.FencedError, match="of epoch 0, and the checkpoint folder knows epoch 1"):
        first.run()
    bench.producer()
    assert second.run()
    assert_settled_once(bench, redis_client)


def test_a_promoted_replica_that_lacks_the_last_updates_is_reconciled(bench, start_server, caplog):
    primary, replica = at_free_port(lambda port: start_server("--port", str(port))), start_server()
    replica.client.replicaof("127.0.0.1", primary.client.config_get("port")["port"])
    wait_for(lambda: replica.client.info("replication")["master_link_status"] == "up")
    bench.url = primary.url
    bench.overrides = ["checkpoint.every=3"]
    with bench.proxy() as proxy:
        trainer = bench.trainer(url=proxy.url)
        bench.producer(url=proxy.url)

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


# Out of reach


def test_a_redis_that_stays_away_ends_the_trainer_with_one_line_and_its_work_is_done_again(
    bench, redis_client, monkeypatch, caplog
):
    bench.overrides = ["redis.outage_s=1.0"]
    open_trainer = entry.open_trainer

    def open_that_commits_at_once(*args, **settings):
        commit_at_once(trainer := open_trainer(*args, **settings))
        return trainer

    with bench.proxy() as proxy:
        monkeypatch.setenv("REDIS_URL", proxy.url)
        bench.producer()
        held = proxy.hold("announce", 6, "before")
        threading.Thread(target=lambda: (held.wait(), proxy.refuse(), held.release()), daemon=True).start()
        with monkeypatch.context() as patch:
            patch.setattr(entry, "open_trainer", open_that_commits_at_once)
            assert entry.main(bench.config, runs=bench.runs) == 1
        assert "has been away for" in caplog.messages[-1] and not tracebacks(caplog)
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 4
    assert second.run()
    assert_settled_once(bench, redis_client)


def test_a_signal_ends_a_trainer_whose_redis_is_away(bench, redis_client, monkeypatch, caplog):
    bench.overrides = ["redis.outage_s=600.0"]
    with bench.proxy() as proxy:
        monkeypatch.setenv("REDIS_URL", proxy.url)
        bench.producer()

        def go_away_and_interrupt() -> None:
            fault.wait()
            proxy.refuse()
            fault.release()
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)

        fault = proxy.hold("announce", 6, "before")
        thread = threading.Thread(target=go_away_and_interrupt, daemon=True)
        thread.start()
        assert entry.main(bench.config, runs=bench.runs) == 1
        thread.join()
    assert "stopped while Redis is away" in caplog.messages[-1]
    assert not tracebacks(caplog)
    second = bench.trainer(resume=True)
    assert second.run()
    assert_settled_once(bench, redis_client)


def test_any_other_error_answer_ends_the_trainer_with_one_line(bench, redis_client, monkeypatch, caplog):
    redis_client.set(bench.keys.prompts, "no stream")
    monkeypatch.setenv("REDIS_URL", bench.url)
    assert entry.main(bench.config, runs=bench.runs) == 1
    assert "WRONGTYPE" in caplog.messages[-1] and not tracebacks(caplog)


# Out of memory, and a stream that nobody trains from


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
    producer = bench.producer(lambda index, version: {**group_fields(index, version), **payload})
    monkeypatch.setattr(
        "penstock.consumers.checkpoints.schedule.MEMORY_HIGH", 1e9
    )  # as if the last commit had been just too early
    trainer = bench.trainer()

    def watch() -> None:
        wait_for(lambda: producer.num_pauses > 3)
        monkeypatch.setattr("penstock.consumers.checkpoints.schedule.MEMORY_HIGH", 0.7)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert trainer.run()
    watcher.join()
    assert producer.problem is None
    assert_settled_once(bench, server.client)
    bench.close()


def test_at_the_memory_limit_prompts_that_nobody_can_get_are_released_again(bench, start_server, monkeypatch, caplog):
    monkeypatch.setattr(trainer_module, "WAITING_LOG_S", 1.0)
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
    bench.producer()
    thread.join(60)
    assert thread.outcome is True
    assert_settled_once(bench, server.client)
    bench.close()


def test_the_backlog_stays_at_the_credit_while_no_trainer_runs(bench, redis_client):
    producers = [bench.producer(), bench.producer()]
    bench.stopped_at(5)
    wait_for(lambda: redis_client.xlen(bench.keys.prompts) == 0)
    answered = sum(producer.num_answered for producer in producers)
    time.sleep(0.5)
    assert sum(producer.num_answered for producer in producers) == answered
    # An entry that came before that of an older index is not trimmed yet, and neither is what came after it.
    waiting = {int(fields[Field.INDEX]) for _, fields in redis_client.xrange(bench.keys.rollouts)}
    assert len(waiting - set(bench.saved_training(redis_client))) == bench.config.credit == 12
    second = bench.trainer(resume=True)
    assert second.leadership.scripts.epoch == 1 and second.policy.version == VERSIONS_PER_EPOCH
    assert second.run()
    assert_settled_once(bench, redis_client)


# Entries that nobody should have written


@pytest.mark.parametrize("is_seen", [True, False])
def test_streams_whose_entry_ids_are_used_up_are_made_anew(bench, redis_client, monkeypatch, caplog, is_seen):
    monkeypatch.setattr(trainer_module, "WAITING_LOG_S", 0.1)
    bench.overrides = ["num_updates=13"]  # the second trainer releases prompts too
    keys, client = bench.keys, redis_client
    streams = [
        keys.prompts, keys.rollouts, keys.evaluation_results, keys.evaluations, keys.policy, keys.dead,
        keys.dead_rollouts,
    ]  # fmt: skip
    bench.producer(
        lambda index, version: dead_fields(index, "reward: boom") if index in (1, 40) else group_fields(index, version)
    )
    first = bench.trainer()

    def use_up(stream: str) -> None:
        fields = {Field.INDEX: 1, Field.VERSION: 0}
        if stream == keys.policy:
            fields[Field.MANIFEST] = client.xrevrange(stream, count=1)[0][1][Field.MANIFEST]
        with client.pipeline() as both:
            both.xadd(stream, fields, id=LARGEST_ID)
            if not is_seen or stream == keys.evaluations:
                both.xdel(stream, LARGEST_ID)
            both.execute()

    for step, stream in enumerate(streams[1:], 2):
        at_step(first, step, partial(use_up, stream))
    first.learner.fail_at[9] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    use_up(keys.prompts)  # while no trainer runs
    assert bench.trainer(resume=True).run()
    assert_settled_once(bench, redis_client, dead={1, 40})
    assert {line["update"] for line in bench.lines("evaluations.jsonl")} == {0, 5, 8, 10, 13}
    said = [text.partition(":")[2].partition(": its entry ids")[0] for text in caplog.messages if "are used up" in text]
    assert {f"{{test}}:{name}" for name in said} >= set(streams) - {keys.dead_rollouts}
    client.xadd(keys.prompts, {"index": 1, "version": 0})  # it takes entries again


@pytest.mark.parametrize("fields", [{"foo": "bar"}, {"index": "x", "version": "0"}, {"index": "9" * 5000}])
def test_a_prompt_entry_that_names_no_task_does_not_stop_the_trainer(bench, redis_client, fields, caplog):
    trainer = bench.trainer()
    entry = redis_client.xadd(bench.keys.prompts, fields)
    thread = TrainerThread(trainer)
    wait_for(lambda: "an entry names no task" in caplog.text)
    redis_client.xdel(bench.keys.prompts, entry)  # what a producer does that claims it
    bench.producer()
    thread.join(60)
    assert thread.outcome is True
    assert_settled_once(bench, redis_client)
