"""`penstock plan`: what it is given, what it reads from a run, and what it prints."""

import copy
import json
import math
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from penstock.deploy.cli import main
from penstock.deploy.plan.planning import figures_of, plan
from penstock.deploy.plan.producer import EngineSpeed, RunPace, SpeedCourse
from penstock.deploy.plan.recorded import PacedRun, _joins_s, read_run
from penstock.deploy.plan.simulation import Simulation
from penstock.deploy.plan.workload import lengths_of
from penstock.schemas.config import ConfigError, RunConfig, config_of
from penstock.schemas.policy import make_version
from recorded_simulation import TRAINER, RecordedSimulation

PACE = RunPace(speed=EngineSpeed(0.02, 0.001), token_s=0.001)
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


LENGTHS = "log-normal:40:0.8"


def small(changed: dict[str, Any]) -> RunConfig:
    return config_of(copy.deepcopy(DOCUMENT), Path("small.toml"), changed)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """With the run `small`: 2 producers, known speeds."""
    runs = tmp_path_factory.mktemp("runs")
    RecordedSimulation(small({}), 2, PACE, lengths_of(LENGTHS), 40).write(runs)
    return runs


TRAINER_IS_THE_LIMIT = RunPace(speed=PACE.speed, update_s=3.0, token_s=0.002, load_s=0.3, pause_s=0.1)


@pytest.fixture(scope="module")
def limited(tmp_path_factory) -> Path:
    """With the run `small`: 4 producers of an update that takes longer than they need."""
    runs = tmp_path_factory.mktemp("limited")
    run = small({"max_lag": 2})
    assert RecordedSimulation(run, 4, TRAINER_IS_THE_LIMIT, lengths_of(LENGTHS), 40).write(runs).waits < 0.1
    return runs


def read_back(
    runs: Path,
    changed: dict[str, Any],
    pace: RunPace,
    *,
    producers: int = 2,
    record: bool = True,
    ahead_s: dict[str, float] | None = None,
) -> PacedRun:
    """What is read of a run that had this pace."""
    run = small(changed)
    RecordedSimulation(run, producers, pace, lengths_of(LENGTHS), 40, ahead_s=ahead_s).write(runs, record=record)
    return read_run(runs / "small")


def assert_speed(found: PacedRun, expected: EngineSpeed, *num_sequences: int, rel: float = 0.1) -> None:
    for num in num_sequences:
        assert found.pace.speed.tokens_per_s(num) == pytest.approx(expected.tokens_per_s(num), rel=rel)


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
    assert found.num_producers == 2
    assert_speed(found, PACE.speed, 4, 32)
    assert (found.pace.update_s, found.pace.token_s) == pytest.approx((0, 0.001))


def test_engines_are_as_fast_where_much_is_sampled_that_is_not_trained_any_more(tmp_path):
    """A run that was stopped leaves as many sampled groups as the credit has, and their tokens are counted."""
    found = read_back(tmp_path, {"max_lag": 12, "num_updates": 1000}, PACE, producers=4)
    assert_speed(found, PACE.speed, 8, 32)


def test_waiting_for_weights_is_no_time_of_the_engine(tmp_path):
    """On policy, prompts are claimed before the weights are there that may sample them."""
    found = read_back(tmp_path, {"max_lag": 0}, msgspec.structs.replace(PACE, announce_s=0.5, load_s=2.0))
    assert_speed(found, PACE.speed, 4, 8)


@pytest.mark.parametrize(("update_s", "token_s"), [(0.0, 0.002), (1.5, 0.001), (2.0, 0.0)])
def test_an_update_has_a_part_that_does_not_grow_with_its_batch(tmp_path, update_s, token_s):
    found = read_back(tmp_path, {}, msgspec.structs.replace(PACE, update_s=update_s, token_s=token_s)).pace
    assert (found.update_s, found.token_s) == pytest.approx((update_s, token_s))
    assert found.update_factors == pytest.approx([1.0] * 39)


def test_updates_of_equal_batches_are_taken_to_grow_with_them(tmp_path):
    """What a larger batch would take cannot be told from them: the same for each of its tokens."""
    factors = tuple(0.9 + 0.04 * (7 * n % 6) for n in range(6))
    pace = RunPace(speed=PACE.speed, update_s=1.0, token_s=0.001, update_factors=factors)
    run = small({})
    RecordedSimulation(run, 2, pace, lengths_of("constant:50"), 40).write(tmp_path)
    found = read_run(tmp_path / "small").pace
    assert found.update_s == 0 and 800 * found.token_s == pytest.approx(1.0 + 800 * 0.001, rel=0.02)


def test_engines_that_were_fast_and_slow_by_turns_are_so_in_a_plan(tmp_path):
    """As on a machine that others use too: what the trainer waits for while they are slow is not made up for later."""
    course = SpeedCourse((1.6, 0.4), 30.0)
    pace = RunPace(speed=PACE.speed, update_s=1.0, token_s=0.0005, speed_courses=(course,))
    found = read_back(tmp_path, {"max_lag": 2}, pace).pace
    for each in found.speed_courses:
        at = [(math.floor(n * each.each_s / 30) % 2, factor) for n, factor in enumerate(each.factors)]
        fast, slow = (fmean(factor for turn, factor in at if turn == which) for which in (0, 1))
        assert fast > 1.5 * slow
    again = plan("small", runs=tmp_path)
    assert again.planned["updates_per_s"] == pytest.approx(again.recorded["updates_per_s"], rel=0.1)
    assert again.planned["lag_mean"] == pytest.approx(again.recorded["lag_mean"], rel=0.15)


def test_a_producer_that_came_late_comes_as_late_in_a_plan(tmp_path):
    found = read_back(tmp_path, {}, msgspec.structs.replace(PACE, joins_s=(0.0, 30.0)))
    assert found.pace.joins_s == pytest.approx((0, 30), abs=3)
    again = plan("small", runs=tmp_path)
    assert again.planned["updates_per_s"] == pytest.approx(again.recorded["updates_per_s"], rel=0.1)
    more = plan("small", runs=tmp_path, producers=3)
    assert more.as_recorded == again.planned and more.planned["trainer_waits"] < again.planned["trainer_waits"]


def test_a_producer_in_place_of_another_is_no_second_one():
    assert _joins_s([(0.0, 10.0), (11.0, 50.0), (20.0, 60.0), (51.0, 90.0)]) == (0.0, 20.0)


@pytest.mark.parametrize(
    ("producers", "changed", "lengths"),
    [
        (1, {"max_lag": 6}, LENGTHS),
        (4, {"max_lag": 1}, LENGTHS),
        (6, {"groups_per_batch": 8}, LENGTHS),
        (3, {}, "log-normal:120:0.5"),
    ],
    ids=str,
)
def test_what_one_run_has_left_says_what_another_comes_to(limited, producers, changed, lengths):
    sets = [f"{name}={value}" for name, value in changed.items()]
    found = plan("small", runs=limited, producers=producers, lengths=lengths, set=sets).planned
    other = small({"seed": 2, "max_lag": 2} | changed)
    came_to = figures_of(Simulation(other, producers, TRAINER_IS_THE_LIMIT, lengths_of(lengths), 40).run(), other)
    assert found["updates_per_s"] == pytest.approx(came_to["updates_per_s"], rel=0.1)
    assert found["lag_mean"] == pytest.approx(came_to["lag_mean"], rel=0.15)


def test_a_run_without_a_record_is_planned_by_its_logs(tmp_path):
    read_back(tmp_path, {}, PACE, record=False)
    found = plan("small", runs=tmp_path)
    assert found.num_producers == 2
    assert found.planned["updates_per_s"] == pytest.approx(found.recorded["updates_per_s"], rel=0.1)
    assert found.planned["lag_mean"] == pytest.approx(found.recorded["lag_mean"], rel=0.15)
    assert found.planned["tokens_per_s"] == pytest.approx(found.recorded["tokens_per_s"], rel=0.1)
    more = plan("small", runs=tmp_path, producers=6, set=["max_lag=4"])
    assert more.as_recorded == found.planned and more.planned["trainer_waits"] < found.planned["trainer_waits"]


@pytest.mark.parametrize("record", [True, False], ids=["recorded", "logged"])
@pytest.mark.parametrize(
    ("ahead_s", "said"),
    [
        ({"producer-0": 600.0}, ["producer-0's clock was 600 s ahead of the trainer's"]),
        ({"producer-1": -420.0}, ["producer-1's clock was 420 s behind the trainer's"]),
        ({TRAINER: 300.0, "producer-1": 301.0}, ["producer-0's clock was 300 s behind the trainer's"]),
    ],
    ids=["one ahead", "one behind", "the trainer's"],
)
def test_clocks_that_differ_by_minutes_change_nothing_and_are_named(tmp_path, capsys, record, ahead_s, said):
    pace = msgspec.structs.replace(PACE, announce_s=0.5, load_s=0.3, joins_s=(0.0, 30.0))
    agreeing = read_back(tmp_path / "agreeing", {}, pace, record=record)
    found = read_back(tmp_path / "differing", {}, pace, record=record, ahead_s=ahead_s)
    assert agreeing.clock_notes == () and [note.partition(":")[0] for note in found.clock_notes] == said
    slack_s = 2.0 if TRAINER in ahead_s else 1e-6  # a second is no difference
    assert found.num_producers == 2 and found.pace.joins_s == pytest.approx(agreeing.pace.joins_s, abs=slack_s)
    assert found.pace.announce_s == pytest.approx(agreeing.pace.announce_s, abs=slack_s)
    for num in (4, 32):
        assert found.pace.speed.tokens_per_s(num) == pytest.approx(agreeing.pace.speed.tokens_per_s(num), rel=0.02)
    assert main(["plan", "small", "--runs", str(tmp_path / "differing")]) == 0
    assert said[0] in " ".join(capsys.readouterr().out.split())


def test_the_time_in_which_a_run_was_stopped_is_none_of_its_updates(tmp_path):
    """Nor is the update after it one of a second less."""
    read_back(tmp_path, {}, PACE)
    before = plan("small", runs=tmp_path).recorded
    log = tmp_path / "small" / "updates.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines[20:]:
        line["policy_version"] = make_version(1, line["policy_version"])
        line["time_s"] += 5000.0
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed = read_run(tmp_path / "small").course
    steps_s = [after["time_s"] - each["time_s"] for each, after in pairwise(lines)]
    assert resumed.num_intervals == 38 and resumed.seconds == pytest.approx(sum(steps_s) - steps_s[19])
    assert figures_of(resumed, small({}))["updates_per_s"] == pytest.approx(before["updates_per_s"], rel=0.05)


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


def test_a_recorded_run_is_planned_with_another_number_of_updates(runs):
    found = plan("small", runs=runs, set=["num_updates=15"])
    numbers = [each["num_updates"] for each in (found.recorded, found.as_recorded, found.planned)]
    assert numbers == [40, 40, 15]


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
        ({"producers": 0}, "--producers 0: expected 1 to 4096"),
        ({"producers": -2}, "--producers -2: expected 1 to 4096"),
        ({"producers": 100_000_000}, "--producers 100000000: expected 1 to 4096"),
        ({"set": ["producers.count=5000"]}, "producers.count = 5000: a plan has 4096 producers at most"),
        ({"tokens_per_s": 0.0}, "--tokens-per-s 0: expected a number above 0"),
        ({"tokens_per_s": math.nan}, "--tokens-per-s nan: expected a number above 0"),
        ({"trainer_tokens_per_s": math.inf}, "--trainer-tokens-per-s inf: expected a number above 0"),
        ({"update_s": -0.5}, "--update-s -0.5: expected a number of 0 or more"),
        ({"weights_s": -1.0}, "--weights-s -1: expected a number of 0 or more"),
        ({"flat": 1.5}, "--flat 1.5: expected a share from 0 to 1"),
        ({"alone_per_s": 10.0}, "--alone-per-s 10: expected 20 to 640: a sequence is as fast by itself as among 32"),
        ({"alone_per_s": 700.0}, "--alone-per-s 700: expected 20 to 640"),
        ({"lengths": "lognormal:20:1"}, "--lengths lognormal:20:1: neither a file, .*did you mean log-normal?"),
        ({"lengths": ""}, "--lengths '': expected a file, a run, or one of constant:TOKENS"),
        ({"set": ["max_lags=3"]}, r"max_lags: unknown field \(did you mean max_lag\?\)"),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_is_refused_by_its_name(run_file, changed, said):
    with pytest.raises(ConfigError, match=said):
        plan(run_file, **NUMBERS | changed)


@pytest.mark.parametrize(
    "lengths", ["log-normal:800:1000", "log-normal:1:1e300", "log-normal:1e300:300", "exponential:1e308", "long.txt"]
)
def test_longer_than_any_number_is_cut_where_completions_are(run_file, tmp_path, monkeypatch, lengths):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text(4_000 * "9")
    sets = ["sampling.max_tokens=50"]
    tokens = plan(run_file, **NUMBERS | {"lengths": lengths, "set": sets}).planned
    per_update = tokens["tokens_per_s"] / tokens["updates_per_s"]
    assert 16 < per_update <= 16 * 50


def test_a_shipped_run_file_is_planned_where_a_run_of_its_name_says_nothing(tmp_path):
    (tmp_path / "demo").mkdir()
    found = plan("demo", runs=tmp_path, **NUMBERS)
    assert found.recorded is None and found.num_producers == 2
    given = {"tokens_per_s": 640.0, "lengths": "constant:20"}
    with pytest.raises(ConfigError, match=r"; to plan the shipped run file, give its path: .*runs/demo\.toml"):
        plan("demo", runs=tmp_path, **given)


def test_a_run_of_a_shipped_name_is_planned_by_its_record(runs, tmp_path):
    shutil.copytree(runs / "small", tmp_path / "demo")
    assert plan("demo", runs=tmp_path, producers=4).recorded["num_updates"] == 40


def test_a_plan_needs_no_torch(run_file):
    """Imported in seconds, before a wrong number would be refused."""
    command = ["plan", str(run_file), "--lengths", "constant:20", "--tokens-per-s", "640"]
    program = (
        "import sys; from penstock.deploy import cli\n"
        f"assert cli.main([*{command}, '--trainer-tokens-per-s', '1000']) == 0\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"


def test_a_run_that_is_not_there_is_told_from_a_misspelt_one(runs):
    with pytest.raises(ConfigError, match=r"smal: neither a run file, .*; did you mean small\?"):
        plan("smal", runs=runs, **NUMBERS)
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file"):
        plan("nowhere.toml", runs=runs, **NUMBERS)


def test_a_run_that_has_left_too_little_says_what_was_expected(runs, tmp_path):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.toml").write_text((runs / "small" / "run.toml").read_text())
    with pytest.raises(ConfigError, match=r"yes, 0 updates after another one, 0 producers, 0 recorded groups, .*: exp"):
        plan("bare", runs=tmp_path)


def test_a_run_whose_heartbeats_hold_no_tokens_says_what_was_expected(tmp_path):
    read_back(tmp_path, {}, PACE, record=False)
    for log in (tmp_path / "small" / "producers").iterdir():
        log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"rate"' not in line))
    with pytest.raises(ConfigError, match=r"small: 0 tokens between heartbeats .*: expected a longer run"):
        plan("small", runs=tmp_path)


def test_the_command_prints_what_is_planned_beside_what_was_recorded(runs, capsys):
    assert main(["plan", "small", "--runs", str(runs), "--producers", "1"]) == 0
    out = capsys.readouterr().out
    assert "small: 1 x " in out
    assert out.split("updates/s")[0].split()[-4:-1] == ["recorded", "simulated", "planned"]
    assert "waited for: producers: the trainer waits" in out and "█" in out


def test_the_command_prints_json_of_a_run(runs, capsys):
    assert main(["plan", "small", "--runs", str(runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pace"]["seats"] == 32 and found["recorded"]["num_updates"] == 40


def test_the_command_prints_json(run_file, capsys):
    command = ["plan", str(run_file), "--json", "--lengths", "constant:20", "--tokens-per-s", "640"]
    assert main([*command, "--trainer-tokens-per-s", "1000"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["planned"]["lags"].values()) == pytest.approx(1)
    assert found["planned"]["waited_for"] in ("trainer", "nobody", "producers")


def test_the_command_s_help_says_what_a_run_file_needs_and_what_a_seat_is(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "A run file needs --tokens-per-s, --trainer-tokens-per-s and --lengths" in shown
    assert "A seat is for one sequence" in shown


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


def test_a_run_too_long_to_be_simulated_whole_has_its_pace_in_less_time(runs: Path):
    """From its beginning to its end: engines that were slower in its second half are so here."""
    courses = (SpeedCourse((1.0, 0.5), 1000.0), SpeedCourse((1.0,), math.inf))
    factors = tuple(1.0 + n for n in range(8))
    pace = msgspec.structs.replace(PACE, speed_courses=courses, update_factors=factors, joins_s=(0.0, 400.0))
    found = read_run(runs / "small")._replace(pace=pace).thinned(4).pace
    assert found.speed_courses == (SpeedCourse((1.0, 0.5), 250.0), courses[1])
    assert (found.update_factors, found.joins_s) == ((1.0, 5.0), (0.0, 100.0))
