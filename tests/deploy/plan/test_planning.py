"""`penstock plan`: what it is given, what it reads from a run, and what it prints."""

import json
import math
import shlex
from pathlib import Path

import pytest

from penstock.deploy.cli import main
from penstock.deploy.plan.planning import plan
from penstock.deploy.plan.producer import EngineSpeed
from penstock.deploy.plan.recorded import read_run
from penstock.deploy.plan.simulation import RunPace
from penstock.deploy.plan.workload import lengths_of
from penstock.schemas.config import ConfigError, config_of
from written_simulation import WrittenSimulation

PACE = RunPace(speed=EngineSpeed(0.02, 0.001), trainer_tokens_per_s=1000.0)
DOCUMENT = {
    "name": "small",
    "num_updates": 40,
    "group_size": 4,
    "groups_per_batch": 4,
    "model": {"path": "none"},
    "environment": {"path": "nobody:Needed"},
    "sampling": {"max_tokens": 400},
    "producers": {"groups_in_flight": 8, "count": 3},
    "evaluation": {"num_prompts": 0},
}
NUMBERS = {"tokens_per_s": 640.0, "trainer_tokens_per_s": 1000.0, "lengths": "constant:20"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """With the run `small`: 2 producers, known speeds."""
    runs = tmp_path_factory.mktemp("runs")
    WrittenSimulation(config_of(DOCUMENT, runs, {}), 2, PACE, lengths_of("log-normal:40:0.8"), 40).write(runs)
    return runs


@pytest.fixture
def run_file(tmp_path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(
        'name = "small"\nnum_updates = 10\ngroup_size = 4\ngroups_per_batch = 4\nmodel.path = "none"\n'
        'environment.path = "nobody:Needed"\nproducers.groups_in_flight = 8\nproducers.count = 3\n'
    )
    return file


def test_a_pace_is_read_back_from_the_record_of_a_run_that_had_it(runs):
    found = read_run(runs / "small")
    assert found.num_producers == 2 and len(found.groups) == 160
    for num_sequences in (4, 32):
        speed = found.pace.speed.tokens_per_s(num_sequences)
        assert speed == pytest.approx(PACE.speed.tokens_per_s(num_sequences), rel=0.1)
    assert found.pace.trainer_tokens_per_s == pytest.approx(1000)


def test_a_recorded_run_is_planned_as_it_came_to_be(runs):
    found = plan("small", runs=runs)
    assert found.planned["updates_per_s"] == pytest.approx(found.recorded["updates_per_s"], rel=0.1)
    assert found.planned["lag_mean"] == pytest.approx(found.recorded["lag_mean"], rel=0.15)
    assert found.planned["trainer_waits"] == pytest.approx(found.recorded["trainer_waits"], abs=0.1)
    assert found.as_recorded is None


def test_a_record_says_what_other_settings_would_have_come_to(runs):
    found = plan("small", runs=runs, producers=1, set=["max_lag=6"])
    as_it_was = plan("small", runs=runs)
    assert found.as_recorded == as_it_was.planned and found.recorded == as_it_was.recorded
    assert found.num_producers == 1 and found.planned["credit"] == 28
    assert found.planned["trainer_waits"] > found.as_recorded["trainer_waits"]


def test_the_lengths_of_a_run_are_those_of_its_record(runs, run_file):
    found = plan(run_file, runs=runs, **{**NUMBERS, "lengths": "small"})
    named = plan(run_file, runs=runs, **{**NUMBERS, "lengths": "log-normal:40:0.8"})
    tokens = [each.planned["tokens_per_s"] / each.planned["updates_per_s"] for each in (found, named)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.25) and tokens[0] > 1.5 * 16 * 20


def test_what_is_given_takes_the_place_of_what_is_recorded(runs):
    found = plan("small", runs=runs, tokens_per_s=64.0, trainer_tokens_per_s=500.0, weights_s=3.0, flat=0.25)
    recorded = plan("small", runs=runs).pace
    assert found.pace["tokens_per_s"] == pytest.approx(64) and found.pace["trainer_tokens_per_s"] == 500
    assert (found.pace["announce_s"], found.pace["load_s"], found.pace["flat"]) == (0, 3, 0.25)
    ratio = recorded["alone_per_s"] / recorded["tokens_per_s"]
    assert found.pace["alone_per_s"] / 64 == pytest.approx(ratio)


def test_a_run_file_needs_the_speeds_and_lengths(run_file):
    found = plan(run_file, **NUMBERS)
    assert found.num_producers == 3 and found.planned["num_updates"] == 10 and found.recorded is None
    assert found.pace["seats"] == 32 and found.pace["alone_per_s"] == pytest.approx(4 * 640 / 32)
    for missing in NUMBERS:
        given = {name: value for name, value in NUMBERS.items() if name != missing}
        with pytest.raises(ConfigError, match=f"--{missing.replace('_', '-')}.*(missing|is not given)"):
            plan(run_file, **given)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"producers": 0}, "--producers 0: expected 1 or more"),
        ({"producers": -2}, "--producers -2: expected 1 or more"),
        ({"tokens_per_s": 0.0}, "--tokens-per-s 0: expected a number above 0"),
        ({"tokens_per_s": math.nan}, "--tokens-per-s nan: expected a number above 0"),
        ({"trainer_tokens_per_s": math.inf}, "--trainer-tokens-per-s inf: expected a number above 0"),
        ({"weights_s": -1.0}, "--weights-s -1: expected a number of 0 or more"),
        ({"flat": 1.5}, "--flat 1.5: expected a share from 0 to 1"),
        ({"alone_per_s": 10.0}, "--alone-per-s 10: expected 20 to 640: a sequence is as fast by itself as among 32"),
        ({"alone_per_s": 700.0}, "--alone-per-s 700: expected 20 to 640"),
        ({"lengths": "lognormal:20:1"}, "--lengths lognormal:20:1: neither a file, .*did you mean log-normal?"),
        ({"set": ["max_lags=3"]}, r"max_lags: unknown field \(did you mean max_lag\?\)"),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_is_refused_by_its_name(run_file, changed, said):
    with pytest.raises(ConfigError, match=said):
        plan(run_file, **NUMBERS | changed)


def test_a_run_that_is_not_there_is_told_from_a_misspelt_one(runs):
    with pytest.raises(ConfigError, match=r"smal: neither a run file, .*; did you mean small\?"):
        plan("smal", runs=runs, **NUMBERS)
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file"):
        plan("nowhere.toml", runs=runs, **NUMBERS)


def test_a_run_without_a_record_says_what_was_expected(runs, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.toml").write_text((runs / "small" / "run.toml").read_text())
    with pytest.raises(ConfigError, match="no record of rollouts; expected the folder of a run with record = true"):
        plan("bare", runs=tmp_path)


def test_the_command_prints_what_is_planned_beside_what_was_recorded(runs, capsys):
    assert main(["plan", "small", "--runs", str(runs), "--producers", "1"]) == 0
    out = capsys.readouterr().out
    assert "small: 1 x " in out
    assert out.split("updates/s")[0].split()[-4:-1] == ["recorded", "simulated", "planned"]
    assert "waited for: producers: the trainer waits" in out and "█" in out


def test_the_command_prints_json(run_file, capsys):
    command = ["plan", str(run_file), "--json", "--lengths", "constant:20", "--tokens-per-s", "640"]
    assert main([*command, "--trainer-tokens-per-s", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["planned"]["lags"].values()) == pytest.approx(1)
    assert found["planned"]["waited_for"] in ("trainer", "nobody", "producers")


def test_a_plan_that_fails_says_why(run_file, capsys):
    command = ["plan", str(run_file), "--lengths", "constant:200", "--tokens-per-s", "32"]
    changed = ["producers.generation_deadline_s=5", "trainer.max_dead_in_a_row=4"]
    sets = [word for each in changed for word in ("--set", each)]
    assert main([*command, "--trainer-tokens-per-s", "1000", *sets]) == 1
    out = capsys.readouterr().out
    assert "the run fails: trainer.max_dead_in_a_row = 4" in out and "not finished after 5 s" in out


def test_the_page_s_example_prints_what_the_page_shows(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    command, shown = (block.strip("\n") for block in page.split("```")[1:4:2])
    assert main(shlex.split(command)[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()
