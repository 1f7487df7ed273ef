"""The record of a run whose trainer is killed, rolled back or short of disk: each trained group once, on its line."""

import errno
import logging
import threading

import pytest

from mini_producer import dead_fields, group_fields, make_group, unscored_fields
from penstock.consumers.checkpoints.checkpoints import Checkpoints
from penstock.consumers.observe.record_files import RecordFiles
from penstock.consumers.stream.settlement import MAX_FAILED_STEPS_IN_A_ROW, RunFailedError
from penstock.schemas.keys import Field
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import encode_group
from scripted_learner import KilledError
from trainer_bench import assert_settled_once, at_step

pytestmark = pytest.mark.redis

PLACES = {
    "before the record is on the disk": (RecordFiles, "sync", "before"),
    "between record and checkpoint": (RecordFiles, "sync", "after"),
    "between checkpoint and commit": (Checkpoints, "_write", "after"),
    "after the commit": (Checkpoints, "committed", "before"),
    "in the middle of a batch": (RecordFiles, "append", "before"),
}


def recorded(record: Record, *, outcome: str = "trained") -> list[int]:
    """The indexes of this outcome on the surviving line, in the order in which they were trained."""
    return [group.entry.index for group in record.groups() if group.entry.outcome == outcome]


def assert_recorded_once(bench, client) -> Record:
    """The record holds what the saved policy was trained on by the learner's own account, in its order."""
    record = Record(bench.folder)
    assert recorded(record) == bench.saved_training(client)
    assert record.missing == []
    assert [at.position for at in record.batches] == list(range(len(record.batches)))
    updates = [head.update for head in map(record.head, record.batches) if head.counts]
    assert updates == list(range(1, len(updates) + 1))
    for group in record.groups():
        if group.entry.outcome == "dead":
            continue
        whole = record.group(group)
        decoded = whole.decode()
        assert decoded.index == group.entry.index and encode_group(decoded) == whole.payload
    return record


@pytest.mark.parametrize("place", PLACES)
def test_a_trainer_killed_around_a_commit_leaves_each_trained_group_once(bench, redis_client, monkeypatch, place):
    owner, method, when = PLACES[place]
    bench.producer()
    first = bench.trainer()
    original, calls = getattr(owner, method), []
    fatal = 6 if method == "append" else 2

    def die(self, *args):
        calls.append(args)
        if len(calls) == fatal and when == "before":
            raise KilledError
        result = original(self, *args)
        if len(calls) == fatal:
            raise KilledError
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, die)
        with pytest.raises(RunFailedError if method == "append" else KilledError):
            first.run()
    second = bench.trainer(resume=True)
    assert second.run()
    assert_settled_once(bench, redis_client)
    record = assert_recorded_once(bench, redis_client)
    assert len(record.batches) == 12


def killed_at(trainer, step: int) -> None:
    trainer.learner.fail_at[step] = KilledError()
    with pytest.raises(KilledError):
        trainer.run()


def test_a_rollback_leaves_out_what_it_undid(bench, redis_client):
    bench.producer()
    first = bench.trainer()
    killed_at(first, 7)
    first.record.recorder.sync()
    before = Record(bench.folder)
    assert len(before.batches) == 7, "what follows the checkpoint counts while nobody has gone back to it"
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 4
    between = Record(bench.folder)
    assert len(between.batches) == 4 and len(between.undone) == 3, "said before the first new batch"
    assert second.run()
    record = assert_recorded_once(bench, redis_client)
    assert len(record.undone) == 3
    assert [at.file.header.epoch for at in record.batches] == [0] * 4 + [1] * 8
    assert record.header.forks == {1: 4} and record.header.line == {0: 4}


def test_continued_without_record_after_a_rollback_what_was_undone_is_left_out(bench, redis_client):
    bench.producer()
    first = bench.trainer()
    killed_at(first, 7)
    first.record.recorder.sync()
    bench.overrides = ["record=false"]
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 4
    killed_at(second, 9)
    record = Record(bench.folder)
    assert len(record.batches) == 4 and len(record.undone) == 3 and record.header.epoch == 1
    assert recorded(record) == bench.saved_training(redis_client)[:16]
    bench.overrides = []
    assert bench.trainer(resume=True).run()
    record = Record(bench.folder)
    assert record.missing == [(4, 8)] and [at.position for at in record.batches] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert recorded(record)[16:] == bench.saved_training(redis_client)[32:]


def test_groups_without_variance_and_of_failed_steps_are_recorded_as_what_became_of_them(bench, redis_client):
    def answer(index: int, version: int) -> dict:
        return group_fields(index, version, rewards=(1.0, 1.0) if index % 5 == 0 else (1.0, 0.0))

    bench.overrides = ["evaluation.num_prompts=0"]
    bench.producer(answer)
    trainer = bench.trainer()
    trainer.learner.fail_at[3] = "gradient norm is not finite"
    trainer.learner.never_finite = {2}
    assert trainer.run()
    record = Record(bench.folder)
    ledger = trainer.intake.ledger
    for outcome in ("trained", "skipped", "dead"):
        indexes = recorded(record, outcome=outcome)
        assert sorted(indexes) == list(ledger.by_outcome[outcome]), outcome
        assert indexes
    dead = {g.entry.index: g.entry.reason for g in record.groups() if g.entry.outcome == "dead"}
    assert dead.pop(2) == "loss is not finite" and len(dead) == 4
    assert set(dead.values()) == {"gradient norm is not finite"}
    failed = [head for head in map(record.head, record.batches) if not head.counts]
    assert [(head.position, head.update, head.skipped_reason) for head in failed] == [
        (3, 3, "gradient norm is not finite")
    ]
    assert len(record.batches) == 12 + 1


def test_a_run_in_which_every_step_fails_stops_and_has_recorded_what_it_settled(bench, redis_client):
    bench.producer()
    trainer = bench.trainer()
    trainer.learner.fails_from = 3
    with pytest.raises(RunFailedError, match="8 optimizer steps in a row failed; the last one: loss is not finite"):
        trainer.run()
    trainer.close()
    ledger, record = bench.ledger(), Record(bench.folder)
    assert (ledger["num_updates"], ledger["num_groups_trained"], ledger["num_groups_dead"]) == (3, 12, 32)
    assert sorted(recorded(record, outcome="dead")) == list(trainer.intake.ledger.by_outcome["dead"])
    assert len(record.batches) == 3 + MAX_FAILED_STEPS_IN_A_ROW
    assert [file.suffix for file in (bench.folder / "record").iterdir()] == [".sqlite"], "closed"
    assert bench.trainer(resume=True).learner.num_steps == 3


def test_nothing_is_committed_that_the_record_does_not_hold(bench, redis_client, monkeypatch, caplog):
    bench.producer()
    trainer = bench.trainer()
    sync, left = RecordFiles.sync, [1]

    def full(self) -> None:
        if left[0]:
            left[0] -= 1
            assert redis_client.hget(bench.keys.commit, "checkpoint") is None
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(self)

    monkeypatch.setattr(RecordFiles, "sync", full)
    assert trainer.run()
    said = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 1 and "the record of rollouts cannot be written" in said[0]
    assert left == [0]
    assert_recorded_once(bench, redis_client)


def test_a_batch_that_cannot_be_recorded_ends_the_run_in_one_line_and_is_never_committed_without(
    bench, redis_client, monkeypatch, caplog
):
    import penstock.schemas.record

    bench.producer()
    first = bench.trainer()
    with monkeypatch.context() as patch:

        def refuse_from_now_on() -> None:
            first.record.recorder.sync()  # the batch before is written in a thread
            patch.setattr(penstock.schemas.record, "MAX_UNPACKED_BYTES", 100)

        at_step(first, 5, refuse_from_now_on)
        with pytest.raises(
            RunFailedError, match=r"a batch cannot be recorded: ValueError: a group of .* at most 100; cont"
        ):
            first.run()
        first.close()
    assert len(bench.saved_training(redis_client)) == 4 * 4, "the checkpoint before it"
    assert "no checkpoint: the record of rollouts cannot be written" in caplog.text
    assert len(Record(bench.folder).batches) == 5
    assert bench.trainer(resume=True).run()
    assert_recorded_once(bench, redis_client)


def test_closing_the_record_hides_no_other_error_and_ends_its_thread(bench, redis_client, monkeypatch, caplog):
    before = {*threading.enumerate()}
    trainer = bench.trainer()

    def fail(self) -> None:
        raise ValueError("no such file")

    with monkeypatch.context() as patch:
        patch.setattr(RecordFiles, "append", lambda *_: 1 // 0)
        patch.setattr(RecordFiles, "close", fail)
        trainer.record.recorder.add_dead([], 0, 0, 0)
        trainer.close()
    assert "a batch cannot be recorded: ZeroDivisionError" in caplog.text
    assert "the record of rollouts is not closed: no such file" in caplog.text
    assert not any(thread.name.startswith("record") for thread in {*threading.enumerate()} - before)


def test_groups_that_died_before_they_could_be_trained_are_recorded_as_far_as_they_came(bench, redis_client):
    dead = {
        3: unscored_fields(3, "reward: KeyError: 'x'"),
        9: dead_fields(9, "prompt: boom"),
        10: group_fields(10, 0) | {Field.PAYLOAD: b"junk"},
    }
    bench.producer(lambda index, version: dead.get(index) or group_fields(index, version))
    trainer = bench.trainer()
    assert trainer.run()
    trainer.close()
    record = assert_recorded_once(bench, redis_client)
    found = {at.entry.index: at for at in record.groups() if at.entry.outcome == "dead"}
    assert sorted(found) == [3, 9, 10] and not any(at.head.counts for at in found.values())
    assert [found[index].entry.reason[:8] for index in (3, 9, 10)] == ["reward: ", "prompt: ", "poison: "]
    assert (found[3].entry.producer_id, found[3].entry.rewards) == (make_group(3, 0).producer_id, ())
    group = record.group(found[3]).decode()
    assert group.prompt == make_group(3, 0).prompt and len(group.rollouts) == 2
    assert [record.group(found[index]).payload for index in (9, 10)] == [b"", b""]
