"""The run folder: whose name it is, who uses it, what it keeps."""

import subprocess
import sys
import threading
import time
import tomllib

import msgspec
import pytest

from penstock.deploy.launch import run_folder
from penstock.deploy.launch.run_folder import RunFolder, resolved_toml, save_run_file
from penstock.schemas.config import (
    ConfigError,
    CorrectionConfig,
    EnvironmentConfig,
    ModelConfig,
    Rejection,
    RewardConfig,
    RunConfig,
    TrainerConfig,
    WeightedReward,
    load_config,
)

CONFIG = RunConfig(
    name="r", model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B", kwargs={"width": 2})
)


def test_a_run_file_reads_back_with_every_default_written_out_and_what_is_not_set_as_a_comment(tmp_path):
    correction = CorrectionConfig(rejection=(Rejection("token_k1", 2.0), Rejection("token_k1", 2.0, 0.5)))
    reward = RewardConfig(components=(WeightedReward(name="right", path="environment", weight=0.5),), timeout_s=2.0)
    config = msgspec.structs.replace(CONFIG, correction=correction, reward=reward)
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(config)
        assert load_config(folder.path / "run.toml") == config
        assert folder.path.stat().st_mode & 0o777 == 0o700, "its owner's alone"
    text = resolved_toml(config)
    document = tomllib.loads(text)
    assert document["engine"]["prefix_caching"] is False and document["correction"]["threshold"] == 2.0
    assert "# engine.max_model_len is not set" in text and "# correction.rejection[0].lower is not set" in text
    save_run_file(CONFIG, tmp_path / "without_a_launcher")
    assert (tmp_path / "without_a_launcher").stat().st_mode & 0o777 == 0o700


def test_a_run_is_begun_once_resumed_if_there_is_one_and_used_by_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.2)
    with pytest.raises(ConfigError, match="nothing to resume"):
        RunFolder(CONFIG, tmp_path, resume=True)
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(CONFIG)
        with pytest.raises(ConfigError, match="in use by another `penstock run`"):
            RunFolder(CONFIG, tmp_path, resume=True)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/r exists already; .* --resume, .* with --name"):
        RunFolder(CONFIG, tmp_path, resume=False)


def test_resume_says_which_settings_changed(tmp_path):
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(CONFIG)
    changed = msgspec.structs.replace(CONFIG, num_updates=7, trainer=TrainerConfig(learning_rate=0.5))
    with RunFolder(CONFIG, tmp_path, resume=True) as folder:
        assert folder.save(changed) == ["num_updates: 100 -> 7", "trainer.learning_rate: 1e-05 -> 0.5"]
        assert load_config(folder.path / "run.toml") == changed


def test_resume_waits_for_a_server_that_still_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 60.0)
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(CONFIG)
        command = [sys.executable, "-c", "input()"]
        lingering = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[folder.lock])
    resumed = threading.Thread(target=lambda: RunFolder(CONFIG, tmp_path, resume=True).__exit__(None, None, None))
    resumed.start()
    time.sleep(0.3)
    assert resumed.is_alive()
    lingering.communicate(b"\n")
    resumed.join(60)
    assert not resumed.is_alive() and lingering.returncode == 0
