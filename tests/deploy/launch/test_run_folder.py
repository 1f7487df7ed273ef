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


def test_saved_run_file_reads_back_as_the_same_configuration(tmp_path):
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(CONFIG)
        assert load_config(folder.path / "run.toml") == CONFIG


def test_resolved_configuration_reads_back_with_every_default_written_out(tmp_path):
    text = resolved_toml(CONFIG)
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert load_config(file) == CONFIG
    document = tomllib.loads(text)
    assert document["engine"]["prefix_caching"] is False and document["correction"]["threshold"] == 2.0
    assert "# engine.max_model_len is not set" in text


def test_resolved_configuration_reads_back_with_what_is_not_set_in_a_list_of_tables(tmp_path):
    correction = CorrectionConfig(rejection=(Rejection("token_k1", 2.0), Rejection("token_k1", 2.0, 0.5)))
    reward = RewardConfig(components=(WeightedReward(name="right", path="environment", weight=0.5),), timeout_s=2.0)
    config = msgspec.structs.replace(CONFIG, correction=correction, reward=reward)
    file = tmp_path / "run.toml"
    file.write_text(resolved_toml(config))
    assert load_config(file) == config
    assert "# correction.rejection[0].lower is not set" in file.read_text()


def test_a_name_that_exists_is_refused_with_both_ways_out(tmp_path):
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(CONFIG)
    with pytest.raises(ConfigError) as error:
        RunFolder(CONFIG, tmp_path, resume=False)
    assert str(tmp_path / "r") in str(error.value)
    assert "--resume" in str(error.value) and "--name" in str(error.value)


def test_a_run_s_folder_is_its_owner_s_alone(tmp_path):
    with RunFolder(CONFIG, tmp_path / "runs", resume=False) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
    save_run_file(CONFIG, tmp_path / "runs" / "without_a_launcher")
    assert (tmp_path / "runs" / "without_a_launcher").stat().st_mode & 0o777 == 0o700


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(ConfigError, match="nothing to resume"):
        RunFolder(CONFIG, tmp_path, resume=True)


def test_resume_says_which_settings_changed(tmp_path):
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(CONFIG)
    changed = msgspec.structs.replace(CONFIG, num_updates=7, trainer=TrainerConfig(learning_rate=0.5))
    with RunFolder(CONFIG, tmp_path, resume=True) as folder:
        assert folder.save(changed) == ["num_updates: 100 -> 7", "trainer.learning_rate: 1e-05 -> 0.5"]
        assert load_config(folder.path / "run.toml") == changed


def test_a_run_is_started_once_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.2)
    with RunFolder(CONFIG, tmp_path, resume=False) as folder:
        folder.save(CONFIG)
        with pytest.raises(ConfigError, match="in use by another `penstock run`"):
            RunFolder(CONFIG, tmp_path, resume=True)


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
