"""The recipes: each is a short run file that can be started, with a section of docs/recipes.md."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.deploy import cli
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.command_line import recipes
from penstock.deploy.launch.machine import Machine
from training_groups import tiny_tokenizer

ROOT = Path(__file__).parents[2]
RECIPES = sorted(recipes())


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(start_checks, "read_machine", Machine)  # whatever this one has


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_ready_to_run(recipe, model_folder, capsys):
    tiny_tokenizer(model_folder)
    asked = ["--set", f"model.path={model_folder}"]
    if "teacher" in tomllib.loads(recipes()[recipe].read_text()):
        asked += ["--set", f"teacher.model={model_folder}"]
    for name in ("train", "test"):
        file = Path("data") / "gsm8k" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"question": f"A {name} of 4 and 5 wagons?", "answer": "4 + 5 = 9\n#### 9"}))
    assert cli.main(["run", recipe, "--dry-run", *asked]) == 0, capsys.readouterr().err
    assert f"recipe:{tomllib.loads(capsys.readouterr().out)['name']}" == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short_and_has_a_section(recipe):
    text = recipes()[recipe].read_text()
    first, *lines = text.splitlines()
    assert re.fullmatch(r"# [A-Z].{20,100}", first), "what `penstock recipes` says about it"
    assert len([line for line in lines if line.strip()]) <= 40
    headings = re.findall(r"^## (.+)$", (ROOT / "docs" / "recipes.md").read_text(), re.M)
    assert recipe.removeprefix("recipe:") in headings


def test_recipes_are_listed_with_what_they_are_and_their_files(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # lines are whole
    assert cli.main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for name, file in recipes().items():
        (line,) = (line for line in shown.splitlines() if line.startswith(f" {name} "))
        assert file.read_text().splitlines()[0].removeprefix("# ") in line and line.endswith(str(file))
