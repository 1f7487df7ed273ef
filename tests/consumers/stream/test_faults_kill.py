"""The trainer killed around a checkpoint, and checkpoints spoiled behind its back."""

import pytest

from penstock.consumers.stream import checkpoints
from penstock.consumers.stream.checkpoints import Checkpoints
from penstock.consumers.stream.reader import entry_key
from scripted_learner import KilledError
from trainer_bench import assert_settled_once

pytestmark = pytest.mark.redis

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
    bench.resilient_producer()
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


def spoil(bench, client, how: str) -> None:
    pointer = client.hget(bench.keys.commit, "checkpoint").decode()
    file = bench.folder / "checkpoints" / pointer / "tensors" / "trained.json"
    content = file.read_bytes()
    if how == "torn":
        file.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    else:
        file.unlink()


@pytest.mark.parametrize("how", ["torn", "flipped", "missing"])
def test_a_spoiled_checkpoint_costs_the_work_since_the_one_before_it_and_no_group(bench, redis_client, caplog, how):
    # The stream was trimmed for the spoiled one: what it had settled since the one before is made again.
    bench.resilient_producer()
    first = bench.trainer()
    first.learner.fail_at[10] = KilledError()
    with pytest.raises(KilledError):
        first.run()
    spoil(bench, redis_client, how)
    second = bench.trainer(resume=True)
    assert second.learner.num_steps == 4
    assert "tensors/trained.json" in caplog.text and "cannot be used" in caplog.text
    assert second.run()
    assert_settled_once(bench, redis_client)


def test_everything_a_trainer_counts_survives_in_its_checkpoint(bench, redis_client):
    bench.overrides = ["evaluation.num_prompts=0"]
    bench.resilient_producer()
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
    kept, left = second.intake.ledger.to_state(), first.intake.ledger.to_state()
    # What was read behind the last batch is read again.
    assert entry_key(kept.pop("last_read").encode()) <= entry_key(left.pop("last_read").encode())
    assert kept == left
    totals = second.progress.totals
    assert totals == first.progress.totals and totals["num_tokens_trained"] >= 7 * 4 * 6
    assert second.progress.num_batches == first.progress.num_batches == 7
    assert totals["num_steps_skipped"] == 1
    assert second.intake.lag_of.forks == {1: 7}
    assert second.intake.lag_of.announced[0] == 7
