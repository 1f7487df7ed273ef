"""Recorded rollouts played again: the same bits, other settings beside them, and clear words for what cannot be."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from penstock.consumers.learning.learner.learner import Learner
from penstock.deploy import cli
from penstock.deploy.replay import command, player
from penstock.schemas.config import TeacherConfig
from penstock.schemas.record import RecordedGroup
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import decode_group
from rank_processes import command_on_ranks, log_of, on_ranks
from rank_work import record_updates
from recorded_training import RecordedTraining, settings
from training_groups import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def model(tmp_path):
    tiny_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def training(tmp_path, model):
    """A run of four updates that a test trains on."""
    training = RecordedTraining(tmp_path / "runs" / "test", model)
    training.train(4)
    return training


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A run of seven updates, with checkpoints after the fourth and the last, that no test changes."""
    folder = tmp_path_factory.mktemp("shared")
    tiny_model(folder / "model")
    training = RecordedTraining(folder / "runs" / "test", folder / "model")
    training.train(4)
    training.train(3)
    return training


@pytest.fixture
def copied(shared, tmp_path):
    """The same run, to be spoiled."""
    copied = RecordedTraining(tmp_path / "runs" / "test", shared.model)
    shutil.copytree(shared.folder, copied.folder, ignore=shutil.ignore_patterns("replay"))
    copied.checkpoints, copied.reports = shared.checkpoints, shared.reports
    return copied


def replay(capsys, training, *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main(["replay", "test", "--runs", str(training.folder.parent), *argv])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def lines(training, name: str, variant: str) -> list[dict]:
    file = training.folder / "replay" / name / "updates.jsonl"
    return [line for line in map(json.loads, file.read_text().splitlines()) if line["variant"] == variant]


def losses(training, name: str, variant: str) -> list[float]:
    return [line["loss"] for line in lines(training, name, variant)]


def test_the_runs_own_settings_give_its_losses_again_bit_for_bit_from_a_checkpoint_too(shared, capsys):
    status, out, err = replay(capsys, shared, "--name", "whole")
    assert status == 0, err
    assert "are those of the run, bit for bit, at all 7 updates" in out
    assert losses(shared, "whole", "own") == losses(shared, "whole", "recorded") == shared.losses
    assert len(set(shared.losses)) == 7
    for line, report in zip(lines(shared, "whole", "own"), shared.reports, strict=True):
        assert {name: line[name] for name in report.metrics} == report.metrics
    changes = {"b": "trainer.betas=[0.1,0.2]", "w": "trainer.weight_decay=9", "s": "seed=5"}
    argv = [part for name, change in changes.items() for part in ("--variant", name, change)]
    argv += ["--from", shared.checkpoints[0], "--variant", "own", "--name", "later"]
    status, out, _ = replay(capsys, shared, *argv)
    assert status == 0 and "bit for bit, at all 3 updates" in out
    assert json.loads((shared.folder / "replay" / "later" / "replay.json").read_text())["from"] == shared.checkpoints[0]
    own = losses(shared, "later", "own")
    assert own == shared.losses[4:] != losses(shared, "later", "s")
    for name in "bw":
        # The first loss is partly of the weights in the checkpoint, before the first step.
        assert all(a != b for a, b in zip(losses(shared, "later", name)[1:], own[1:], strict=True))


def test_variants_stand_beside_the_record_and_in_another_process_are_equal_to_the_last_byte(shared, capsys):
    objectives = "penstock.consumers.learning.objectives"
    argv = ["--objective", f"{objectives}.cispo:Cispo", "--variant", "strict", "correction.threshold=1.01"]
    argv += ["--set", "trainer.learning_rate=1e-3", "--updates", "3"]
    status, out, _ = replay(capsys, shared, *argv, "--name", "a")
    assert status == 0
    for name in ("recorded", "cispo", "strict"):
        assert [line["update"] for line in lines(shared, "a", name)] == [1, 2, 3]
        assert name in out
    first = {name: lines(shared, "a", name)[0] for name in ("recorded", "cispo", "strict")}
    assert first["cispo"]["learning_rate"] == pytest.approx(1e-3 / 5)
    assert first["strict"]["rollout_correction/clipped_frac"] > first["recorded"]["rollout_correction/clipped_frac"]
    assert first["recorded"]["loss"] == shared.losses[0]
    results = shared.folder / "replay" / "a"
    table = (results / "table.md").read_text()
    assert "## grad norm (`grad_norm`)" in table and "| update | recorded | cispo | strict |" in table
    assert (results / "replay.svg").read_text().count("<svg") == 1
    command = [sys.executable, "-m", "penstock.deploy.cli", "replay", str(shared.folder), *argv, "--name", "b"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    for file in ("updates.jsonl", "table.md", "replay.json", "replay.svg"):
        assert (results / file).read_bytes() == (results.parent / "b" / file).read_bytes(), file


def test_losses_that_are_not_the_runs_are_told_and_are_a_failure(shared, capsys, monkeypatch):
    pack = Learner.pack
    monkeypatch.setattr(Learner, "pack", lambda self, groups, lag_of: pack(self, groups[::-1], lag_of))
    status, out, _ = replay(capsys, shared, "--name", "turned")
    assert status == 1
    assert "differ at " in out and "bit for bit" not in out


def refused(capsys, training, *argv: str) -> str:
    before = set(training.folder.glob("replay/*"))
    status, out, err = replay(capsys, training, *argv)
    assert status == 2, out + err
    assert err.count("\n") == 1 and set(training.folder.glob("replay/*")) == before
    return err


BAD_INPUT = (
    (["--objective", "penstock.consumers.learning.objectives.none:None"], "cannot import 'penstock.consumers.learning"),
    (["--objective", "json:JSONDecoder"], "objective"),
    (["--objective", "a:Grpo", "--objective", "b:Grpo"], "'grpo': two have this name"),
    (["--variant", "Recorded"], "'Recorded': the name of the run's own numbers; expected"),
    (["--objective", "a:Recorded"], "'recorded': the name of the run's own numbers"),
    (["--set", "correction.mod=none"], "correction.mod: unknown field (did you mean mode?), expected one of mode"),
    (["--set", "correction.mode=sometimes"], "correction.mode = 'sometimes'"),
    (["--set", "sampling.temperature=0.5"], "a replay does not read sampling.temp"),
    (["--variant", "v", "correction.mode"], "expected FIELD=VALUE"),
    (["--variant", "a/b", "max_lag=1"], "variant 'a/b': expected a name of letters"),
    (["--name", "../x"], "--name '../x': expected letters"),
    (["--updates", "0"], "--updates 0: expected 1 or more"),
    (["--from", "7-abc"], "--from 7-abc: no such checkpoint; expected one of the run's ("),
    (["--set", "model.path=nowhere"], "model.path = 'nowhere': no model there"),
)


def test_bad_input_is_named_with_what_was_expected(shared, capsys, monkeypatch, tmp_path):
    for argv, said in BAD_INPUT:
        assert said in refused(capsys, shared, *argv), argv
    (tmp_path / "elsewhere" / "test").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")  # where a folder of the run's name stands: it is not taken for the run
    assert replay(capsys, shared, "--name", "mine", "--updates", "1")[0] == 0
    assert "exists already; choose another name" in refused(capsys, shared, "--name", "mine")
    monkeypatch.setattr(RecordedGroup, "decode", lambda self: decode_group(self.payload[:-1]))
    said = refused(capsys, shared)
    assert "variant 'own': " in said and "batch 0: " in said
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrong = "2 ranks started, to be played on 1: expected 1, or --set trainer.num_processes=2"
    assert wrong in refused(capsys, shared)


def test_a_run_of_which_something_is_lost_is_refused(copied, capsys, monkeypatch, tmp_path):
    load, last = player.load_checkpoint, copied.checkpoints[1]

    def delete_and_load(folder, learner):
        shutil.rmtree(folder)
        return load(folder, learner)

    with monkeypatch.context() as patched:
        patched.setattr(player, "load_checkpoint", delete_and_load)
        said = refused(capsys, copied, "--from", copied.checkpoints[0])
    assert f"--from {copied.checkpoints[0]}: " in said and "no whole checkpoint" in said
    other = tmp_path / "other"
    tiny_model(other, seed=1)
    assert "another model than the one that was trained: digest" in refused(
        capsys, copied, "--set", f"model.path={other}"
    )
    file = copied.folder / "checkpoints" / last / "tensors" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "tensors/rank-0.safetensors: checksum differs" in refused(capsys, copied, "--from", last)
    shutil.rmtree(copied.folder / "record")
    assert "no record of rollouts; expected" in refused(capsys, copied)


def test_a_record_with_gaps_is_played_as_far_as_it_goes_and_from_a_checkpoint_on_its_line(training, model, capsys):
    training.train(2, config=settings(model))
    training.train(1)
    oldest, middle, _ = sorted((training.folder / "record").iterdir())
    away = middle.rename(training.folder / "middle")
    assert "batches 4 to 5 are missing; expected --updates of at most 4" in refused(capsys, training)
    assert replay(capsys, training, "--updates", "4")[0] == 0
    away.rename(middle)
    oldest.unlink()
    assert Record(training.folder).missing == [(0, 4)]
    said = refused(capsys, training)
    assert "its first batch is of update 5: the oldest were dropped" in said and "--from a checkpoint" in said
    assert replay(capsys, training, "--from", training.checkpoints[0])[0] == 0
    undone = training.checkpoints[1]
    training._taken = {0: 4}
    training.train(2)
    assert f"--from {undone}: the run was rolled back before it" in refused(capsys, training, "--from", undone)


def test_what_finished_before_the_record_broke_is_kept(copied, capsys, monkeypatch):
    play = player.play

    def break_before_the_second(record, batches, start, variant, ranks):
        if variant.name == "second":
            with closing(sqlite3.connect(batches[3].file.path)) as connection:
                connection.execute("UPDATE contents SET payload = x'00' WHERE position = 3")
                connection.commit()
        return play(record, batches, start, variant, ranks)

    monkeypatch.setattr(player, "play", break_before_the_second)
    argv = ["--variant", "first", "max_lag=3", "--variant", "second", "max_lag=4", "--name", "broken"]
    status, out, err = replay(capsys, copied, *argv)
    assert status == 2 and err.count("\n") == 1, out + err
    assert "variant 'second': " in err and "batch 3: altered" in err and "broken/updates.jsonl" in err
    assert [len(lines(copied, "broken", name)) for name in ("recorded", "first", "second")] == [7, 7, 0]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> RecordedTraining:
    """A run that two ranks trained."""
    folder = tmp_path_factory.mktemp("on-two")
    tiny_model(folder / "model")
    on_ranks(2, record_updates, folder / "runs" / "test", folder / "model", 4, folder=folder / "work")
    return RecordedTraining(folder / "runs" / "test", folder / "model")


@pytest.mark.xdist_group("ranks")
def test_a_run_of_two_ranks_is_played_on_two_bit_for_bit_and_on_one_within_a_tolerance(on_two, capsys, monkeypatch):
    assert Record(on_two.folder).header.config["trainer"]["num_processes"] == 2
    started: list[int] = []
    monkeypatch.setattr(command, "run_as_ranks", lambda size: started.append(size) or 0)
    status, _, err = replay(capsys, on_two)
    assert (status, started) == (0, [2])
    assert (
        "on 2 ranks, as the run; --set trainer.num_processes=1 needs one only, and compares within a tolerance" in err
    )
    words = ["replay", str(on_two.folder), "--name", "two"]
    statuses = command_on_ranks(2, words, on_two.folder / "command")
    said = log_of(on_two.folder / "command", 0)
    assert statuses == [0, 0], said
    assert "are those of the run, bit for bit, at all 4 updates" in said
    assert losses(on_two, "two", "own") == losses(on_two, "two", "recorded")
    status, out, err = replay(capsys, on_two, "--set", "trainer.num_processes=1", "--name", "one")
    assert status == 0, err
    assert "are those of the run, within 0.0001, at all 4 updates" in out
    assert losses(on_two, "one", "set") == pytest.approx(losses(on_two, "one", "recorded"), abs=1e-5)


def test_batches_of_different_numbers_of_ranks_are_refused_until_one_is_chosen(training, model, capsys):
    training.train(2, config=settings(model), num_ranks=3)
    err = refused(capsys, training)
    assert "to be played on 1 and 3 ranks; expected one number for all updates and variants" in err
    assert replay(capsys, training, "--updates", "4")[0] == 0
    status, out, _ = replay(capsys, training, "--set", "trainer.num_processes=1")
    assert status == 0 and "are those of the run, within 0.0001, at all 6 updates" in out


def test_a_run_with_a_teacher_is_played_bit_for_bit_and_any_run_with_one(tmp_path, model, capsys):
    teacher = tmp_path / "teacher"
    tiny_model(teacher, seed=4)
    for folder in (model, teacher):
        tiny_tokenizer(folder)
    training = RecordedTraining(tmp_path / "runs" / "test", model)
    training.train(2)
    with_teacher = ["--set", f"teacher.model={teacher}", "--set", "teacher.alone=false", "--name", "tried"]
    status, _, err = replay(capsys, training, *with_teacher)
    assert status == 0, err
    assert all("teacher_kl" in line for line in lines(training, "tried", "set"))
    assert losses(training, "tried", "set") != training.losses
    status, _, err = replay(capsys, training, "--set", "teacher.url=http://127.0.0.1:1/v1")
    assert status == 2 and "batch 0: group 1: no teacher_logprobs, which its producer should have requested from" in err

    taught = RecordedTraining(tmp_path / "taught" / "test", model)
    taught.train(2, config=settings(model, teacher=TeacherConfig(model=str(teacher))))
    taught.train(2, config=settings(model, teacher=TeacherConfig(model=str(teacher), coefficient=0.5)))
    for start in ([], ["--from", taught.checkpoints[0]]):
        status, out, err = replay(capsys, taught, *start)
        assert status == 0, err
        assert "are those of the run, bit for bit, at all" in out
