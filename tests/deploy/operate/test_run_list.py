"""`penstock list`: every run of a folder, by its files alone."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.deploy import cli
from penstock.deploy.launch.run_folder import RunFolder
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """finished, with a torn last line; stopped before its first update; one of another release; no run."""
    for name in ("finished", "stopped"):
        with RunFolder(config(name), tmp_path, resume=False) as folder:
            folder.save(config(name))
    line = json.dumps({"update": 7, "time_s": 1.8e9, "reward": 0.25})
    (tmp_path / "finished" / "updates.jsonl").write_text(f'{{"update": 6}}\n{line}\n{{"upd')
    (tmp_path / "finished" / "trainer.json").write_text('{"finished": true}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.toml").write_text("steps = 3")
    (tmp_path / "models").mkdir()
    return tmp_path


def config(name: str) -> RunConfig:
    return RunConfig(
        name=name, num_updates=7, model=ModelConfig(path="models/m"), environment=EnvironmentConfig(path="a:B")
    )


def listed(capsys: pytest.CaptureFixture[str], runs: Path) -> dict[str, dict[str, Any]]:
    assert cli.main(["list", "--runs", str(runs), "--json"]) == 0
    return {run["name"]: run for run in json.loads(capsys.readouterr().out)}


def test_each_run_is_listed_with_its_state_model_updates_and_last_reward(capsys, runs) -> None:
    found = listed(capsys, runs)
    assert found.keys() == {"finished", "stopped", "other"}
    times = [run["time_s"] or 0.0 for run in found.values()]
    assert times == sorted(times, reverse=True), "the latest first"
    assert found["finished"] == {
        "name": "finished",
        "state": "finished",
        "model": "models/m",
        "num_updates": 7,
        "num_updates_wanted": 7,
        "reward": 0.25,
        "time_s": 1.8e9,
    }
    assert (found["stopped"]["state"], found["stopped"]["num_updates"], found["stopped"]["reward"]) == (
        "stopped", 0, None,
    )  # fmt: skip
    assert found["other"]["state"] == "unreadable: KeyError('model')"


def test_a_run_whose_launcher_lives_is_running_and_one_that_no_launcher_started_says_so(capsys, runs) -> None:
    with RunFolder(config("finished"), runs, resume=True):
        assert listed(capsys, runs)["finished"]["state"] == "running"
    (runs / "stopped" / "lock").unlink()
    assert [listed(capsys, runs)[name]["state"] for name in ("finished", "stopped")] == ["finished", "parts"]


def test_in_a_pipe_long_names_and_paths_stay_whole(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = msgspec.structs.replace(config("r"), model=ModelConfig(path="/a/long/path" * 20))
    with RunFolder(long, tmp_path, resume=False) as folder:
        folder.save(long)
    assert cli.main(["list", "--runs", str(tmp_path)]) == 0
    assert long.model.path in capsys.readouterr().out
    assert cli.main(["report", "r", "--runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line == line.rstrip() for line in lines), "nothing is padded"
    (line,) = [line for line in lines if "missing" in line]
    assert line.split("missing")[1].strip() == "updates.jsonl, evaluations.jsonl, trainer.json, producers/*.jsonl"


def test_the_table_has_a_line_a_run_and_a_folder_without_one_says_so(capsys, runs, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["list", "--runs", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line.split() for line in lines if line.split()[:1] == ["finished"]]
    assert line[:5] == ["finished", "finished", "models/m", "7/7", "0.250"] and line[5].startswith("2027-01-1")
    assert cli.main(["list", "--runs", str(runs / "nothing")]) == 0
    assert f"no run in {runs / 'nothing'}" in capsys.readouterr().err
