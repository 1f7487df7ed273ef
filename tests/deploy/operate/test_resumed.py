"""What a run is continued from is checked before anything starts."""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from penstock.consumers.checkpoints.checkpoints import Checkpoints
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.learner.learner import Learner
from penstock.deploy import cli
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.machine import Machine
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.operate.resumed import check_resumed
from penstock.schemas.config import (
    ConfigError,
    EnvironmentConfig,
    LoraConfig,
    ModelConfig,
    Plug,
    RedisConfig,
    SamplingConfig,
    TeacherConfig,
    TrainerConfig,
)
from training_groups import configuration, tiny_model

ARITHMETIC = EnvironmentConfig(path="penstock.producers.environments.arithmetic:Arithmetic", kwargs={"width": 2})


SGD = Plug(path="torch.optim:SGD")


def _save_state(run: Path) -> None:
    """Saves what these checks read of a checkpoint of update 100."""
    state = {"policy_version": 100, "num_batches": 100, "learner": {"num_steps": 100}}
    (checkpoint := run / "checkpoints" / "100-a").mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(state))
    digest = hashlib.blake2b((checkpoint / "state.json").read_bytes(), digest_size=16).hexdigest()
    (checkpoint / "checksums.json").write_text(json.dumps({"state.json": digest}))


def test_a_resumed_adapter_of_another_base_or_scale_is_refused_before_anything_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(start_checks, "read_machine", Machine)  # whatever this one has
    monkeypatch.chdir(tmp_path)
    tiny_model(tmp_path / "tiny")
    config = configuration(tmp_path / "tiny", name="r", lora=LoraConfig(rank=2), environment=ARITHMETIC)
    save_run_file(config, tmp_path / "runs" / "r")
    checkpoints = Checkpoints(tmp_path / "runs" / "r" / "checkpoints", 2, tmp_path / "tiny")
    checkpoints.claim_epoch(0)
    learner = Learner(config)
    checkpoints.begin(learner, CheckpointState(policy_version=3, learner=learner.state())).result()

    def resumed(*overrides: str) -> str:
        words = (word for each in overrides for word in ("--set", each))
        file = str(Path("runs") / "r" / "run.toml")
        status = cli.main(["run", file, "--resume", "--dry-run", *words])
        line = capsys.readouterr().err.splitlines()[-1]
        assert status == (2 if overrides else 0), line
        return line

    assert "all is well" in resumed()
    assert "lora.alpha = 8.0: the adapter in " in resumed("lora.alpha=8.0")
    assert "lora.rank = 4: the adapter in " in resumed("lora.rank=4")
    tiny_model(tmp_path / "other", seed=1)
    assert "holds an adapter of another base: digest" in resumed(f"model.path={tmp_path / 'other'}")


def test_a_run_that_began_without_a_teachers_server_is_not_continued_with_one(tmp_path):
    config = configuration("m", name="r", environment=ARITHMETIC)
    served = msgspec.structs.replace(config, teacher=TeacherConfig(url="http://127.0.0.1:1/v1"))
    held = msgspec.structs.replace(config, teacher=TeacherConfig(model="t"))
    for before, after, is_refused in ((config, served, True), (held, served, True), (served, served, False)):
        save_run_file(before, tmp_path / "r")
        with pytest.raises(ConfigError, match="the run began without") if is_refused else nullcontext():
            check_resumed(after, tmp_path)
    check_resumed(held, tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"group_size": 4}, r"group_size = 4: the run had 8 so far, and groups that wait to be trained have no other"),
        ({"group_size": 16}, ""),
        ({"sampling": SamplingConfig(top_logprobs=20)}, r"sampling\.top_logprobs = 20: the run had 0 so far"),
        (
            {"model": ModelConfig(path="m", replay_routes=True)},
            r"model\.replay_routes = True: the run had False so far",
        ),
        (
            {"trainer": TrainerConfig(optimizer=SGD)},
            r"trainer\.optimizer: torch\.optim:SGD, and the checkpoint has .*AdamW",
        ),
        ({"trainer": TrainerConfig(optimizer=Plug(path="torch.optim:AdamW"))}, ""),
    ],
)
def test_settings_that_the_groups_and_the_state_so_far_do_not_fit_are_refused(tmp_path, changes, problem):
    config = configuration("m", name="r", environment=ARITHMETIC, group_size=8)
    _save_state(tmp_path / "r")
    save_run_file(config, tmp_path / "r")
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_resumed(msgspec.structs.replace(config, **changes), tmp_path)


def test_a_decay_of_another_length_says_how_the_rate_jumps(tmp_path, monkeypatch, capsys):
    trainer = TrainerConfig(learning_rate=1e-4, decay="cosine")
    config = configuration("m", name="r", environment=ARITHMETIC, trainer=trainer, num_updates=100)
    _save_state(tmp_path / "r")
    save_run_file(config, tmp_path / "r")

    def warned(**changes) -> list[str]:
        return check_resumed(msgspec.structs.replace(config, **changes), tmp_path)

    (warning,) = warned(num_updates=200)
    assert "trainer.decay = 'cosine' falls over 200 optimizer steps now, over 100 before" in warning
    assert "the learning rate of the next one, 101, is 5e-05 in place of 0" in warning
    for changes in (
        {},
        {"seed": 3},
        {"num_updates": 200, "trainer": msgspec.structs.replace(trainer, learning_rate=1e-5)},
    ):
        assert warned(**changes) == [], changes
    after = msgspec.structs.replace(config, num_updates=200, redis=RedisConfig(url="redis://localhost:1/0"))
    save_run_file(after, tmp_path / "after")
    monkeypatch.setattr("penstock.deploy.launch.start_checks.check", lambda config: SimpleNamespace(config=config))
    monkeypatch.setattr("penstock.consumers.__main__.main", lambda *arguments, **settings: 0)
    for how in ("--resume", "--standby"):
        assert cli.main(["trainer", str(tmp_path / "after" / "run.toml"), "--runs", str(tmp_path), how]) == 0
        assert f"penstock: warning: {warning}" in capsys.readouterr().err, how
