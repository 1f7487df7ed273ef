import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.experiments import command
from bench.experiments.experiment import CellResult, Experiment, ResultError, read_result, write_result
from bench.experiments.page import PageError, markers, write_part
from penstock.schemas.config import ConfigError, RunConfig, load_config

RUN = """
name = "workload"
[model]
path = "nothing-here"
[environment]
path = "penstock.producers.environments.arithmetic:Arithmetic"
"""
NAMES = ["a-1", "a-2", "b-1"]


class NamedCell(msgspec.Struct, frozen=True):
    name: str


class NamedResult(CellResult, kw_only=True):
    cell: NamedCell


class Small(Experiment[NamedCell, NamedResult]):
    """Three cells that train in no time; the user presses Ctrl-C in the one called `stop_at`."""

    name = "small"
    result_type = NamedResult

    def __init__(self, folder: Path) -> None:
        self.results = folder / "results"
        self.page = folder / "page.md"
        self.page.write_text("before\n{}\n{}\nafter\n".format(*markers("small")))
        (folder / "run.toml").write_text(RUN)
        self.run_file = folder / "run.toml"
        self.overrides = ["num_updates=3"]
        self.ran: list[str] = []
        self.stop_at = ""

    def cells(self, *, gpu: bool) -> list[NamedCell]:
        return [NamedCell(name) for name in NAMES]

    def config(self, cell: NamedCell, *, gpu: bool) -> RunConfig:
        return load_config(self.run_file, self.overrides)

    def settings(self, cell: NamedCell, *, gpu: bool) -> dict[str, Any]:
        return {"set": self.overrides}

    def recipe(self, cell: NamedCell) -> None:
        return None

    def run(self, cell: NamedCell, *, gpu: bool, on_update: Callable[[int], None]) -> NamedResult:
        if cell.name == self.stop_at:
            raise KeyboardInterrupt
        self.ran.append(cell.name)
        on_update(3)
        return result(cell, self.settings(cell, gpu=gpu))

    def tables(self, results: Sequence[NamedResult]) -> str:
        return f"{len(results)} cells"

    def draw(self, results: Sequence[NamedResult]) -> list[Path]:
        return []


def result(cell: NamedCell, settings: dict[str, Any]) -> NamedResult:
    curves = {"reward": [0.123456789, None, math.nan]}
    accuracy = [(0, 0.25), (3, 0.5)]
    return NamedResult(cell=cell, date="", packages={}, settings=settings, curves=curves, accuracy=accuracy)


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Small:
    small = Small(tmp_path)
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    monkeypatch.setattr(command, "open_experiment", lambda name, runs: small)
    return small


def test_an_experiment_that_was_stopped_continues_with_the_rest(experiment: Small, capsys: pytest.CaptureFixture[str]):
    before = experiment.page.read_text()
    experiment.stop_at = "a-2"
    assert command.main(["small"]) == 130
    assert experiment.ran == ["a-1"]
    assert experiment.page.read_text() == before
    experiment.stop_at = ""
    assert command.main(["small"]) == 0
    assert experiment.ran == NAMES
    assert "1 of 3 cells are finished" in capsys.readouterr().out
    begin, end = markers("small")
    assert experiment.page.read_text() == f"before\n{begin}\n\n3 cells\n{end}\nafter\n"
    assert command.main(["small"]) == 0
    assert experiment.ran == NAMES


def test_finished_cells_are_run_again_when_asked(experiment: Small):
    assert command.main(["small"]) == 0
    assert command.main(["small", "--fresh", "--only", "b"]) == 0
    assert experiment.ran[3:] == ["b-1"]


def test_a_finished_cell_of_other_settings_is_run_again(experiment: Small):
    assert command.main(["small"]) == 0
    experiment.overrides = ["num_updates=4"]
    assert command.main(["small"]) == 0
    assert experiment.ran == NAMES + NAMES


def test_a_name_that_no_cell_has_is_refused(experiment: Small, capsys: pytest.CaptureFixture[str]):
    assert command.main(["small", "--only", "nobody"]) == 2
    assert "no such cell; expected a part of one of a-1, a-2, b-1" in capsys.readouterr().err


def test_an_unusable_run_file_is_refused_before_anything_is_run(experiment: Small, capsys: pytest.CaptureFixture[str]):
    experiment.overrides = ["trainer.learning_rate=-1.0"]
    assert command.main(["small"]) == 2
    assert "trainer.learning_rate = -1.0" in capsys.readouterr().err
    assert experiment.ran == []


def test_an_unfinished_experiment_leaves_the_page_as_it_is(experiment: Small, capsys: pytest.CaptureFixture[str]):
    before = experiment.page.read_text()
    assert command.main(["small", "--only", "a"]) == 0
    assert command.main(["small", "--present"]) == 0
    assert "not finished: b-1; figures and page are left as they are" in capsys.readouterr().out
    assert experiment.page.read_text() == before


def test_a_result_of_settings_that_are_no_more_does_not_reach_the_page(
    experiment: Small, capsys: pytest.CaptureFixture[str]
):
    assert command.main(["small"]) == 0
    experiment.overrides = ["num_updates=4"]
    assert command.main(["small", "--present"]) == 0
    assert "not finished: a-1, a-2, b-1" in capsys.readouterr().out


def test_a_result_comes_back_with_five_digits_and_none_for_what_is_not_finite(tmp_path: Path):
    cell = NamedCell("a-1")
    write_result(result(cell, {"set": []}), tmp_path)
    found = read_result(cell, tmp_path, NamedResult)
    assert found is not None
    assert found.curves == {"reward": [0.12346, None, None]}
    assert (found.accuracy, found.settings) == ([(0, 0.25), (3, 0.5)], {"set": []})
    assert read_result(NamedCell("a-2"), tmp_path, NamedResult) is None
    assert [file.name for file in tmp_path.iterdir()] == ["a-1.json"]


def test_a_result_that_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "a-1.json").write_text('{"cell": 3}')
    with pytest.raises(ResultError, match=r"a-1\.json: no result of a cell"):
        read_result(NamedCell("a-1"), tmp_path, NamedResult)
    write_result(result(NamedCell("a-2"), {}), tmp_path).rename(tmp_path / "a-1.json")
    with pytest.raises(ResultError, match="holds the cell a-2"):
        read_result(NamedCell("a-1"), tmp_path, NamedResult)


def test_a_page_without_its_markers_is_refused(tmp_path: Path):
    page, (begin, end) = tmp_path / "page.md", markers("small")
    for text in ("nothing\n", f"{end}\n{begin}\n", f"{begin}\n{begin}\n{end}\n"):
        page.write_text(text)
        with pytest.raises(PageError, match=r"page\.md: expected one <!-- small"):
            write_part(page, "small", "tables")
        assert page.read_text() == text
    with pytest.raises(PageError, match="no such file"):
        write_part(tmp_path / "none.md", "small", "tables")


def test_experiments_are_opened_by_name_or_by_file(tmp_path: Path):
    assert command.open_experiment("study", tmp_path).name == "study"
    assert command.open_experiment("ablation-prefix", tmp_path).name == "ablation-prefix"
    with pytest.raises(ConfigError, match=r"none\.toml: no such file"):
        command.open_experiment("none.toml", tmp_path)
