"""A disk that is full: one clear line, nothing half written, and the training goes on or is continued."""

import contextlib
import logging
import resource
import time
from collections.abc import Iterator

import pytest

import penstock.consumers.__main__ as entry
from penstock.schemas.process.files import digest
from trainer_bench import assert_settled_once

pytestmark = pytest.mark.redis

LIMIT_BYTES = 300_000


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow beyond `LIMIT_BYTES`: what a full disk does to the large ones."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def errors(caplog) -> list[str]:
    assert not [record for record in caplog.records if record.exc_info]
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


def with_large_state(trainer):
    """An optimizer of 1 MB; the policy itself stays small."""
    write = trainer.learner.write

    def write_moments_too(folder):
        sums = write(folder)
        (folder / "moments").write_bytes(bytes(1_000_000))
        return {**sums, "moments": digest(folder / "moments")}

    trainer.learner.write = write_moments_too
    return trainer


def fill_from(trainer, step: int, until: int, stack: contextlib.ExitStack) -> None:
    """The disk is full from one optimizer step to another."""
    train = trainer.learner.step

    def fill_and_train(batch):
        if trainer.learner.num_steps == step:
            stack.enter_context(full_disk())
        if trainer.learner.num_steps == until:
            stack.close()
        return train(batch)

    trainer.learner.step = fill_and_train


def checkpoint_names(bench) -> list[str]:
    return sorted(path.name for path in (bench.folder / "checkpoints").iterdir() if path.is_dir())


def test_a_checkpoint_that_cannot_be_written_is_tried_again_while_training_goes_on(
    bench, redis_client, monkeypatch, caplog
):
    monkeypatch.setattr("penstock.consumers.checkpoints.schedule.FIRST_RETRY_S", 0.02)
    bench.producer()
    trainer = with_large_state(bench.trainer())
    seen = []
    with contextlib.ExitStack() as stack:
        fill_from(trainer, 6, 11, stack)  # the checkpoint of update 8 does not fit
        train = trainer.learner.step
        trainer.learner.step = lambda batch: (time.sleep(0.02), seen.append(checkpoint_names(bench)), train(batch))[2]
        assert trainer.run()
    assert_settled_once(bench, redis_client)
    assert len(trainer.learner.trained) == 48
    lines = errors(caplog)
    assert 1 <= len(lines) <= 12, "the delay doubles"
    assert "cannot be written: [Errno 27] File too large; training goes on, next try in 0 s" in lines[0]
    assert [name.partition("-")[0] for name in seen[10]] == ["4"], "the one before stays, nothing half written does"


def test_a_run_that_cannot_write_its_last_checkpoint_stops_and_is_continued_from_the_one_before(
    bench, redis_client, monkeypatch, caplog
):
    monkeypatch.setenv("REDIS_URL", bench.url)
    bench.producer()
    open_trainer = entry.open_trainer
    with contextlib.ExitStack() as stack:

        def open_with_full_disk(*args, **kwargs):
            trainer = with_large_state(open_trainer(*args, **kwargs))
            fill_from(trainer, 9, 99, stack)
            return trainer

        monkeypatch.setattr(entry, "open_trainer", open_with_full_disk)
        assert entry.main(bench.config, runs=bench.runs) == 1
    assert "cannot be written: [Errno 27] File too large" in errors(caplog)[-1]
    newest = max(int(name.partition("-")[0]) for name in checkpoint_names(bench))
    assert newest <= 9
    monkeypatch.setattr(entry, "open_trainer", open_trainer)
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == newest
    assert second.run()
    assert_settled_once(bench, redis_client)
