"""The pages of docs/tutorials work as they are: every block is executed, on a synthetic run if it needs one.

`tests/e2e/test_tutorials.py` executes them on a real run, `tests/producers/endpoint/test_frameworks.py` runs the agent.
"""

import importlib
import inspect
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import penstock
from inspected_run import NAME, byte_tokenizer, inspected_run
from penstock.consumers.learning.held_out import HeldOutAnswers, held_out_figures
from penstock.deploy import results, running
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.machine import Machine
from penstock.producers.rollout.run_environments import open_environments
from penstock.schemas.config import RunConfig, config_of
from penstock.schemas.prompt import Prompt
from training_groups import tiny_model
from tutorial import PAGES, blocks, cells, play, save_modules


@pytest.fixture(autouse=True)
def in_a_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory on the import path, and no window for figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for module in ("my_sums", "my_rewards"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(start_checks, "read_machine", Machine)
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")
    return tmp_path


@pytest.fixture
def written(in_a_lab: Path) -> Path:
    """Run `NAME` in `runs`: updates, evaluations and a record, with a tokenizer as its model."""
    inspected_run(runs := in_a_lab / "runs")
    update = {"policy_version": 1, "time_s": 1.0, "lag_histogram": {"0": 3, "2": 1}, "reward": 0.5, "reward/exact": 0.5}
    update |= dict.fromkeys(("num_tokens_trained", "num_groups_trained", "num_groups_skipped"), 4)
    update |= {
        "entropy": 0.2,
        "ess_fraction": 0.9,
        "chi2": 0.01,
        "rollout_correction/k3_kl": 1e-4,
        "num_tokens_masked_lag": 0,
    }
    point = {"policy_version": 1, "num_prompts": 2, "time_s": 1.0, "reward": 0.5, "reward/exact": 0.25}
    for name, line in (("updates", update), ("evaluations", point)):
        lines = [json.dumps(line | {"update": number, "policy_version": number}) for number in range(1, 12)]
        (runs / NAME / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    byte_tokenizer(runs / NAME / "model")
    return runs / NAME


def test_the_cells_of_the_first_page_show_a_run_and_its_worst_rollouts(
    written: Path, in_a_lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The run itself is replaced; its arguments are checked against the real signature."""
    asked = []

    def run(*args: Any, **settings: Any) -> penstock.RunResult:
        asked.append(inspect.signature(real).bind(*args, **settings).arguments)
        return results.report(NAME)

    real = running.run
    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr("penstock.deploy.demo.make_model.make_model", lambda folder: asked.append(folder))
    save_modules("python", in_a_lab)
    byte_tokenizer(in_a_lab / "runs" / "models" / "demo")
    tiny_model(in_a_lab / "runs" / "models" / "demo", vocab_size=300)
    names = play(cells("python", NAME))
    assert asked == [
        "runs/models/demo",
        {"config": "demo", "name": NAME, "set": {"record": True}},
        {"config": "demo", "name": NAME, "resume": True, "on_update": (watch := names["watch"])},
    ]
    assert [watch({"reward/exact": value}) for value in (0.5, 1.0)] == [None, "stop"]
    training, held_out = names["axes"].lines
    assert list(training.get_ydata()) == [0.5] * 11 and list(held_out.get_ydata()) == [0.25] * 11
    assert names["late"].num_rows and set(names["late"]["update"].to_pylist()) <= {7, 8, 9, 10, 11}
    shown = capsys.readouterr().out
    assert shown.count("  reward ") == 3 and "environment  main (penstock.producers.environments.arithmetic" in shown
    assert shown.endswith("my_sums:nearly 3e-05\n")
    nearly = names["my_sums"].nearly
    said = ("42", " 42 ", "32", "41", "x")
    assert [nearly(Prompt(text="", answer="42"), each) for each in said] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_the_cell_of_the_page_on_health_draws_six_numbers(written: Path) -> None:
    (cell,) = cells("health", NAME)
    axes = play([cell.replace('"fast"', repr(NAME))])["axes"]
    drawn = {panel.get_title(): panel.lines[0].get_ydata() for panel in axes.flat}
    assert drawn["mean lag, optimizer steps"][0] == 0.5 and drawn["groups skipped, share"][0] == 0.5
    assert len(drawn) == 6 and all(len(values) == 11 and None not in values for values in drawn.values())


def test_the_table_of_functions_has_each_of_them_and_its_first_arguments() -> None:
    page = (PAGES / "python.md").read_text(encoding="utf-8").partition("## All functions")[2]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    calls = [call.strip("| `") for row in rows for call in row.split("`, `")]
    found = {call.partition("(")[0]: call.partition("(")[2].rstrip(")").split(", ") for call in calls}
    assert len(found) == len(calls), "each has one row"
    assert found.keys() == {name for name in dir(penstock) if name[0].islower()}
    for name, given in found.items():
        required = [p for p in inspect.signature(getattr(penstock, name)).parameters.values() if p.default is p.empty]
        assert [p.name for p in required] == [one for one in given if one], name
    assert [name for name in dir(penstock) if name.endswith(("Error", "Died")) and f"`{name}`" not in page] == []


def test_the_block_of_the_page_on_evaluation_prints_a_line_for_each_set(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The engine is replaced; the arguments and the names of the figures are checked."""
    real = running.evaluate

    def evaluate(*args: Any, **settings: Any) -> penstock.Evaluated:
        given = inspect.signature(real).bind(*args, **settings).arguments
        config = penstock.load_config(given["config"], set=given["set"])
        assert (given["model"], config.num_evaluation_prompts) == ("runs/demo/model", {"main": 64})
        answers = [HeldOutAnswers("main", [{"reward": reward}]) for reward in (1.0, 0.0)]
        figures = held_out_figures(answers, config.held_out)
        one = penstock.SetResult(name="main", num_prompts=2, num_samples=1, num_failed=0, figures=figures)
        return penstock.Evaluated(model=given["model"], sets=(one,), failures={}, wall_s=1.0)

    monkeypatch.setattr(running, "evaluate", evaluate)
    play(blocks("../evaluation"))
    assert capsys.readouterr().out == "main 0.5 0.5\n()\n"


@pytest.fixture
def data(in_a_lab: Path) -> RunConfig:
    """The data, reward and run file of the page."""
    save_modules("data", in_a_lab)
    (lines,), (run_file,) = blocks("data", "json"), blocks("data", "toml")
    (in_a_lab / "data").mkdir()
    (in_a_lab / "data" / "train.jsonl").write_text(lines)
    (in_a_lab / "data" / "test.jsonl").write_text(lines.splitlines()[0] + "\n")
    (in_a_lab / "mine.toml").write_text(run_file)
    return penstock.load_config("mine.toml")


def test_the_data_of_their_page_are_tried_as_it_shows_and_may_be_parquet(data: RunConfig, capsys: Any) -> None:
    assert penstock.try_environment("mine.toml", 1, set={"model.path": ""})
    command, *shown = next(block for block in blocks("data", "") if block.startswith("$ penstock try")).splitlines()
    assert command == "$ penstock try mine.toml -n 1 --set model.path="
    assert capsys.readouterr().out.splitlines() == shown
    environment = open_environments(data).named("main").environment
    (parquet,) = cells("data", NAME)
    play([parquet])
    again = penstock.load_config("mine.toml", set={"environment.kwargs.training": "data/train.parquet"})
    other = open_environments(again).named("main").environment
    for index in range(1, 7):
        own, parquets = environment.prompt(index), other.prompt(index)
        assert (own.messages, own.answer) == (parquets.messages, parquets.answer)


def test_the_reward_of_the_page_on_data_is_that_of_the_last_number(data: RunConfig) -> None:
    last_number = importlib.import_module("my_rewards").last_number
    prompt = Prompt(text="", answer="42")
    said = ("It is 17 + 25 = **42**.", "42", "42, not 17", "none", "")
    assert [last_number(prompt, each) for each in said] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_run_files_of_agent_and_machines_fit_their_modules(in_a_lab: Path, model_folder: Path) -> None:
    save_modules("agent", in_a_lab)
    configs = {}
    for page, num_held_out in (("agent", 0), ("machines", 256)):
        (document,) = map(tomllib.loads, blocks(page, "toml"))
        configs[page] = config_of(document, PAGES / f"{page}.md", {"model.path": str(model_folder)})
        assert penstock.check(configs[page]).num_evaluation_prompts == {"main": num_held_out}
    sums = open_environments(configs["agent"]).named("main").environment
    first, second = (sums.prompt(index) for index in (1, 2))
    assert first != second and first.text == f"What is {first.text[8:10].strip()} + {first.text[12:].strip(' +?')}?"


def test_no_tutorial_and_no_block_is_left_out() -> None:
    counts = {page.stem: len(blocks(page.stem)) for page in PAGES.glob("*.md")}
    assert counts == {"python": 7, "data": 2, "agent": 2, "health": 1, "machines": 0}
