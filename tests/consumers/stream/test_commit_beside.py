"""A checkpoint is written beside the training: what is trained meanwhile, and what must not have happened yet."""

import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from penstock.consumers.checkpoints.schedule import CommitSchedule
from penstock.consumers.stream.ledger import RunFailedError
from penstock.consumers.trainer import Trainer
from trainer_bench import TrainerBench, assert_settled_once, at_step
from trainer_thread import TrainerThread
from waiting import wait_for


@pytest.fixture
def beside(bench: TrainerBench) -> TrainerBench:
    bench.commits_later = True
    bench.overrides = ["evaluation.num_prompts=0"]
    bench.producer()
    return bench


class HeldCheckpoints:
    """Holds a trainer's checkpoints back: each is whole only when `release` says so."""

    def __init__(self, trainer: Trainer) -> None:
        self.num_begun = 0
        self.held: list[tuple[Future[dict[str, str]], dict[str, str]]] = []
        self._trainer, self.begin = trainer, trainer.learner.begin_checkpoint
        trainer.learner.begin_checkpoint = self._hold
        trainer.commits.schedule.num_batches = 0  # no checkpoint while it waits for the first rollouts
        abandon = trainer.commits.abandon
        trainer.commits.abandon = lambda: (self.held and self.release(), abandon())

    def _hold(self, folder: Path) -> Future[dict[str, str]]:
        assert not self.held, "one at a time"
        self.num_begun += 1
        self.held.append((Future(), self.begin(folder).result()))
        return self.held[0][0]

    def write(self) -> None:
        """Returns once the checkpoint is whole, and only its commit is left."""
        writing = self._trainer.commits._snapshot.writing
        self.release()
        wait_for(writing.done)

    def end(self) -> None:
        """From now on all are written at once."""
        self._trainer.learner.begin_checkpoint = self.begin
        self.write()

    def release(self) -> None:
        (written, sums), self.held = self.held[0], []
        written.set_result(sums)


def updates_of_checkpoints(bench: TrainerBench) -> list[int]:
    names = [path.name for path in (bench.folder / "checkpoints").iterdir() if path.is_dir()]
    return sorted(int(name.partition("-")[0]) for name in names if not name.startswith("partial"))


@pytest.mark.redis
def test_a_commit_that_becomes_due_while_another_is_written_follows_it(beside, redis_client):
    beside.overrides += ["num_updates=15"]
    trainer = beside.trainer()
    disk = HeldCheckpoints(trainer)
    train, found = trainer.learner.step, []

    def step(batch):
        found.append(disk.num_begun)
        if trainer.learner.num_steps in (9, 12):
            (disk.write if trainer.learner.num_steps == 9 else disk.end)()
        return train(batch)

    trainer.learner.step = step
    assert trainer.run()
    assert found == [0] * 4 + [1] * 6 + [2] * 5, "those of updates 4 and 10; the second was due at 8"
    assert_settled_once(beside, redis_client)


@pytest.mark.redis
@pytest.mark.parametrize("ends", ["stopped", "given up"])
def test_a_trainer_that_ends_waits_for_the_checkpoint_under_way_and_commits_what_it_has(beside, redis_client, ends):
    trainer = beside.trainer()
    disk = HeldCheckpoints(trainer)
    if ends == "stopped":
        at_step(trainer, 6, trainer.stop)
    else:
        at_step(trainer, 6, lambda: (_ for _ in ()).throw(RunFailedError("it is enough")))
    thread = TrainerThread(trainer)
    for update in (4, 7 if ends == "stopped" else 6):
        wait_for(lambda: disk.held)
        time.sleep(0.05)
        assert thread.is_alive()
        disk.release()
        wait_for(lambda update=update: update in updates_of_checkpoints(beside))
    thread.join(60)
    assert thread.outcome is False if ends == "stopped" else isinstance(thread.outcome, RunFailedError)
    assert len(beside.saved_training(redis_client)) == 4 * (7 if ends == "stopped" else 6)
    assert beside.trainer(resume=True).run()
    assert_settled_once(beside, redis_client)


def test_what_is_due_after_a_commit_and_after_a_checkpoint_that_could_not_be_written() -> None:
    now_s = [100.0]
    # Every fourth update; memory is never asked for: nothing was settled since the last commit.
    schedule = CommitSchedule(lambda: 0.0, 4, lambda: now_s[0])
    schedule.committed(4, 0, took_s=1.0)
    assert not schedule.is_due(5, 0, busy=True)
    assert schedule.is_due(9, 0, busy=True), "update 8 went by while another was written"
    schedule.committed(9, 0, took_s=1.0)
    assert not schedule.is_due(11, 0, busy=True) and schedule.is_due(12, 0, busy=True)
    for expected_s in (1, 2, 4, 8, 16, 30, 30):
        delay_s = schedule.failed()
        assert delay_s == expected_s
        now_s[0] += 0.75 * delay_s
        assert not schedule.is_due(16, 0, busy=True), "not even the checkpoint of a later update"
        assert not schedule.is_due(16, 0, busy=False)
        now_s[0] += 0.25 * delay_s
        assert schedule.is_due(17, 0, busy=True) and schedule.is_due(17, 0, busy=False)
    schedule.committed(17, 0, took_s=1.0)
    assert not schedule.is_due(17, 0, busy=True) and schedule.is_due(20, 0, busy=True)
    assert schedule.failed() == 1, "the tries begin anew"
