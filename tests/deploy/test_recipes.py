"""The recipes: each is a short run file that can be started, with a page that docs/recipes.md lists."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from bench.recipes_check import SMALL, write_data
from penstock.deploy import cli
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.command_line import recipes
from penstock.deploy.launch.machine import Machine
from training_groups import tiny_tokenizer
from vision_models import tiny_idefics3

ROOT = Path(__file__).parents[2]
RECIPES = sorted(recipes())
SEEING = {"recipe:pictures", "recipe:qwen3-vl"}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(start_checks, "read_machine", Machine)  # whatever this one has


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_ready_to_run_as_it_is_and_as_the_check_of_recipes_runs_it(recipe, model_folder, capsys):
    if recipe in SEEING:
        tiny_idefics3(model_folder)
    else:
        tiny_tokenizer(model_folder)
    settings = {"model.path": model_folder}
    if "teacher" in tomllib.loads(recipes()[recipe].read_text()):
        settings["teacher.model"] = model_folder
    write_data(Path())
    for changed in (settings, SMALL[recipe.removeprefix("recipe:")] | settings):
        asked = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
        assert cli.main(["run", recipe, "--dry-run", *asked]) == 0, capsys.readouterr().err
        assert f"recipe:{tomllib.loads(capsys.readouterr().out)['name']}" == recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_short_and_has_a_page(recipe):
    text = recipes()[recipe].read_text()
    first, *lines = text.splitlines()
    assert re.fullmatch(r"# [A-Z].{20,100}", first), "what `penstock recipes` says about it"
    assert len([line for line in lines if line.strip()]) <= 40
    page = recipes()[recipe].with_name("README.md")
    assert f"penstock run {recipe}\n" in page.read_text() and "hat to change first" in page.read_text()
    listed = f"| [{page.parent.name}](../{page.relative_to(ROOT)}) | {first.removeprefix('# ')} |"
    assert listed in (ROOT / "docs" / "recipes.md").read_text().splitlines()


def test_recipes_are_listed_with_what_they_are_and_their_files(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # lines are whole
    assert cli.main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for name, file in recipes().items():
        (line,) = (line for line in shown.splitlines() if line.startswith(f" {name} "))
        assert file.read_text().splitlines()[0].removeprefix("# ") in line and line.endswith(str(file))
