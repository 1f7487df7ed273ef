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
from penstock.deploy.replay import command
from penstock.schemas.config import LoraConfig, TeacherConfig, TrainerConfig
from penstock.schemas.record_reader import Record
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
    training = RecordedTraining(tmp_path / "runs" / "test", model)
    training.train(4)
    return training


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


def test_the_runs_own_settings_give_its_losses_again_bit_for_bit(training, capsys):
    status, out, err = replay(capsys, training)
    assert status == 0, err
    assert "are those of the run, bit for bit, at all 4 updates" in out
    assert losses(training, "1", "own") == losses(training, "1", "recorded") == training.losses
    assert len(set(training.losses)) == 4
    for line, report in zip(lines(training, "1", "own"), training.reports, strict=True):
        assert {name: line[name] for name in report.metrics} == report.metrics


def test_replays_in_this_process_and_in_one_of_its_own_are_equal_to_the_last_byte(training, capsys):
    gspo = "penstock.consumers.learning.objectives.gspo:Gspo"
    variants = ["--variant", "mask", "correction.mode=token_mask", "--objective", gspo]
    status, _, err = replay(capsys, training, *variants, "--name", "a")
    assert status == 0, err
    command = [sys.executable, "-m", "penstock.deploy.cli", "replay", str(training.folder), *variants, "--name", "b"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    for file in ("updates.jsonl", "table.md", "replay.json", "replay.svg"):
        first, second = ((training.folder / "replay" / name / file).read_bytes() for name in ("a", "b"))
        assert first == second, file
    assert losses(training, "a", "gspo") != losses(training, "a", "mask") != losses(training, "a", "recorded")


def test_a_run_that_was_continued_with_other_settings_is_played_with_them_from_there_on(training, model, capsys):
    other = TrainerConfig(device="cpu", learning_rate=1e-3, num_minibatches=1, decay="linear", max_grad_norm=0.5)
    training.train(3, config=settings(model, trainer=other, num_updates=20))
    status, out, _ = replay(capsys, training)
    assert status == 0 and "bit for bit, at all 7 updates" in out
    assert losses(training, "1", "own") == training.losses


def test_a_variant_has_its_own_optimizer_settings_and_seed_from_a_checkpoint_on(training, capsys):
    training.train(3)
    settings = {"b": "trainer.betas=[0.1,0.2]", "w": "trainer.weight_decay=9", "s": "seed=5"}
    argv = [part for name, setting in settings.items() for part in ("--variant", name, setting)]
    assert replay(capsys, training, "--from", training.checkpoints[0], "--variant", "own", *argv)[0] == 0
    own = losses(training, "1", "own")
    assert own == training.losses[4:]
    for name in "bw":
        # The first loss is partly of the weights in the checkpoint, before the first step.
        assert all(a != b for a, b in zip(losses(training, "1", name)[1:], own[1:], strict=True))
    assert losses(training, "1", "s") != own


def test_a_replay_from_a_checkpoint_goes_on_where_the_run_did(training, capsys):
    training.train(3)
    status, out, _ = replay(capsys, training, "--from", training.checkpoints[0])
    assert status == 0 and "bit for bit, at all 3 updates" in out
    assert losses(training, "1", "own") == training.losses[4:]
    assert json.loads((training.folder / "replay" / "1" / "replay.json").read_text())["from"] == training.checkpoints[0]


def test_losses_that_are_not_the_runs_are_told_and_are_a_failure(training, capsys, monkeypatch):
    pack = Learner.pack
    monkeypatch.setattr(Learner, "pack", lambda self, groups, lag_of: pack(self, groups[::-1], lag_of))
    status, out, _ = replay(capsys, training)
    assert status == 1
    assert "differ at " in out and "bit for bit" not in out


def test_variants_stand_beside_the_record_in_table_file_and_figure(training, capsys):
    status, out, _ = replay(
        capsys,
        training,
        *(
            "--objective",
            "penstock.consumers.learning.objectives.cispo:Cispo",
            "--variant",
            "strict",
            "correction.threshold=1.01",
        ),
        *("--set", "trainer.learning_rate=1e-3", "--updates", "3", "--name", "compared"),
    )
    assert status == 0
    for name in ("recorded", "cispo", "strict"):
        assert [line["update"] for line in lines(training, "compared", name)] == [1, 2, 3]
        assert name in out
    first = {name: lines(training, "compared", name)[0] for name in ("recorded", "cispo", "strict")}
    assert first["cispo"]["learning_rate"] == pytest.approx(1e-3 / 5)
    assert first["strict"]["rollout_correction/clipped_frac"] > first["recorded"]["rollout_correction/clipped_frac"]
    assert first["recorded"]["loss"] == training.losses[0]
    table = (training.folder / "replay" / "compared" / "table.md").read_text()
    assert "## grad norm (`grad_norm`)" in table and "| update | recorded | cispo | strict |" in table
    assert (training.folder / "replay" / "compared" / "replay.svg").read_text().count("<svg") == 1


def refused(capsys, training, *argv: str) -> str:
    status, out, err = replay(capsys, training, *argv)
    assert status == 2, out + err
    assert err.count("\n") == 1 and not (training.folder / "replay").exists()
    return err


BAD_INPUT = {
    "an unknown objective": (
        ["--objective", "penstock.consumers.learning.objectives.none:None"],
        r"cannot import 'penstock.consumers.learning.objec",
    ),
    "an objective that is none": (["--objective", "json:JSONDecoder"], "objective"),
    "two objectives of one name": (["--objective", "a:Grpo", "--objective", "b:Grpo"], "'grpo': two have this name"),
    "two variants of one name": (["--variant", "v", "--variant", "v", "max_lag=1"], "'v': two have this name"),
    "the record's own name": (["--variant", "recorded", "max_lag=1"], "'recorded': the name of the run's own numbers"),
    "that name in capitals": (["--variant", "Recorded"], "'Recorded': the name of the run's own numbers; expected"),
    "an objective of that name": (["--objective", "a:Recorded"], "'recorded': the name of the run's own numbers"),
    "an unknown field": (
        ["--set", "correction.mod=none"],
        "correction.mod: unknown field (did you mean mode?), expected one of mode",
    ),
    "a value that does not fit": (["--set", "correction.mode=sometimes"], "correction.mode = 'sometimes'"),
    "a field that no step reads": (["--set", "sampling.temperature=0.5"], "a replay does not read sampling.temp"),
    "no value": (["--variant", "v", "correction.mode"], "expected FIELD=VALUE"),
    "a variant's name": (["--variant", "a/b", "max_lag=1"], "variant 'a/b': expected a name of letters"),
    "a results' name": (["--name", "../x"], "--name '../x': expected letters"),
    "no update": (["--updates", "0"], "--updates 0: expected 1 or more"),
    "no such checkpoint": (["--from", "7-abc"], "--from 7-abc: no such checkpoint; expected one of the run's (7-"),
    "a model that is not there": (["--set", "model.path=nowhere"], "model.path = 'nowhere': no model there"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_with_what_was_expected(training, capsys, case):
    argv, said = BAD_INPUT[case]
    assert said in refused(capsys, training, *argv)


def test_another_model_than_the_trained_one_is_refused(training, model, capsys):
    tiny_model(model, seed=1)
    assert "another model than the one that was trained: digest" in refused(capsys, training)


def test_a_run_without_a_record_is_refused(training, capsys):
    shutil.rmtree(training.folder / "record")
    assert "no record of rollouts; expected" in refused(capsys, training)


def test_a_name_that_is_taken_is_refused(training, capsys):
    assert replay(capsys, training, "--name", "mine", "--updates", "1")[0] == 0
    status, _, err = replay(capsys, training, "--name", "mine")
    assert status == 2 and "exists already; choose another name" in err


def test_a_record_that_has_lost_its_oldest_files_is_played_from_a_checkpoint_only(training, model, capsys):
    training.train(2, config=settings(model))
    min((training.folder / "record").iterdir()).unlink()
    assert Record(training.folder).missing == [(0, 4)]
    said = refused(capsys, training)
    assert "its first batch is of update 5: the oldest were dropped" in said and "--from a checkpoint" in said
    assert replay(capsys, training, "--from", training.checkpoints[0])[0] == 0


def test_a_gap_is_named_with_the_updates_before_it(training, model, capsys):
    training.train(2)
    training.train(1)
    sorted((training.folder / "record").iterdir())[1].unlink()
    assert "batches 4 to 5 are missing; expected --updates of at most 4" in refused(capsys, training)
    assert replay(capsys, training, "--updates", "4")[0] == 0


def test_a_checkpoint_behind_which_the_run_was_rolled_back_is_refused(training, capsys):
    training.train(3)
    undone = training.checkpoints[1]
    training._taken = {0: 4}
    training.train(2)
    assert f"--from {undone}: the run was rolled back before it" in refused(capsys, training, "--from", undone)


def test_a_spoiled_checkpoint_is_refused(training, capsys):
    training.train(1)
    file = training.folder / "checkpoints" / training.checkpoints[0] / "tensors" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "tensors/rank-0.safetensors: checksum differs" in refused(
        capsys, training, "--from", training.checkpoints[0]
    )


def test_a_checkpoint_deleted_meanwhile_is_named(training, capsys, monkeypatch):
    import penstock.deploy.replay.player as player

    training.train(1)
    load = player.load_checkpoint

    def delete_and_load(folder, learner):
        shutil.rmtree(folder)
        return load(folder, learner)

    monkeypatch.setattr(player, "load_checkpoint", delete_and_load)
    said = refused(capsys, training, "--from", training.checkpoints[0])
    assert f"--from {training.checkpoints[0]}: " in said and "no whole checkpoint" in said


def test_what_finished_before_the_record_broke_is_kept(training, capsys, monkeypatch):
    import penstock.deploy.replay.player as player

    play = player.play

    def break_before_the_second(record, batches, start, variant, ranks):
        if variant.name == "second":
            with closing(sqlite3.connect(batches[-1].file.path)) as connection:
                connection.execute("UPDATE contents SET payload = x'00' WHERE position = 3")
                connection.commit()
        return play(record, batches, start, variant, ranks)

    monkeypatch.setattr(player, "play", break_before_the_second)
    argv = ["--variant", "first", "max_lag=3", "--variant", "second", "max_lag=4", "--name", "broken"]
    status, out, err = replay(capsys, training, *argv)
    assert status == 2 and err.count("\n") == 1, out + err
    assert "variant 'second': " in err and "batch 3: altered" in err and "broken/updates.jsonl" in err
    assert [len(lines(training, "broken", name)) for name in ("recorded", "first", "second")] == [4, 4, 0]


def test_a_folder_of_the_runs_name_where_one_stands_is_not_taken_for_it(training, capsys, tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "test").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert replay(capsys, training, "--updates", "1")[0] == 0


def test_a_recorded_group_that_breaks_the_contract_is_named(training, capsys, monkeypatch):
    from penstock.schemas.record import RecordedGroup
    from penstock.schemas.rollout import decode_group

    monkeypatch.setattr(RecordedGroup, "decode", lambda self: decode_group(self.payload[:-1]))
    said = refused(capsys, training)
    assert "variant 'own': " in said and "batch 0: " in said


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


def test_ranks_of_another_number_than_the_run_s_are_refused(training, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "2 ranks started, to be played on 1: expected 1, or --set trainer.num_processes=2" in refused(
        capsys, training
    )


def test_a_run_of_an_adapter_is_played_bit_for_bit_from_its_record_and_from_a_checkpoint(tmp_path, model, capsys):
    training = RecordedTraining(tmp_path / "runs" / "test", model)
    training.train(3, config=settings(model, lora=LoraConfig(rank=3, alpha=6.0)))
    status, out, err = replay(capsys, training)
    assert status == 0, err
    assert "are those of the run, bit for bit, at all 3 updates" in out
    assert losses(training, "1", "own") == training.losses


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
