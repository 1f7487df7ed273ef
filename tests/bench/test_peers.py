import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from bench.peers import __main__ as peers
from penstock.schemas.config import load_config

RUN_FILE = """
name = "demo"
[model]
path = "{model}"
[environment]
path = "penstock.producers.environments.arithmetic:Arithmetic"
"""
MEASUREMENT = {
    "model": "models/demo",
    "curve": [
        {"update": 0, "train_s": 0.0, "wall_s": 0.1, "accuracy": 0.4, "reward": None},
        {"update": 60, "train_s": 20.0, "wall_s": 21.0, "accuracy": 0.9125, "reward": 0.8},
    ],
    "num_updates": 60,
    "train_s": 20.0,
    "train_cpu_s": 15.0,
    "evaluation_s": 1.0,
    "updates_per_s": 3.0,
    "time_to_goal_s": 20.0,
    "phases_s": {"generate": 6.0, "score": 1.0, "forward": 5.0, "backward": 7.0, "rest": 1.0},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run_file(tmp_path: Path, model: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE.format(model=model))
    return file


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield


def test_without_trl_it_says_what_to_install(
    run_file: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "bench.peers.trl_run", raising=False)
    assert peers.main([str(run_file), "--model", str(model)]) == 2
    error = capsys.readouterr().err
    assert "trl" in error and "bench/peers/requirements.txt" in error


def test_a_model_that_is_not_there_is_named(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main([str(run_file), "--model", "nowhere"]) == 2
    assert "--model nowhere: no model there" in capsys.readouterr().err


def test_a_summary_is_wanted_for_each_model(
    run_file: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summary.json").write_text("{}")
    status = peers.main(
        [str(run_file), "--model", str(model), "--model", str(model), "--summary", str(tmp_path / "summary.json")]
    )
    assert status == 2
    assert "1 given for 2 models" in capsys.readouterr().err


def test_both_starts_are_measured_unless_models_are_named(run_file: Path, model: Path) -> None:
    assert peers.default_models(load_config(run_file)) == [model, Path(f"{model}-0.63")]


def test_a_measurement_is_shown_beside_penstocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps({"goal_reached_s": 8.0}))
    peers.print_measurement(MEASUREMENT, summary)
    text = capsys.readouterr().out
    for part in ("0.400 -> 0.912", "20.0 s of training", "60 in 20.0 s, 3.00/s", "generate 30%", "0.40 of TRL's time"):
        assert part in text


def test_a_goal_that_was_not_reached_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    peers.print_measurement(MEASUREMENT | {"time_to_goal_s": None}, None)
    assert "not reached" in capsys.readouterr().out


def test_the_machine_is_described_without_its_name() -> None:
    assert set(peers.machine()) == {"processor", "num_cores", "load_average", "system", "python"}
