"""The study trains its cells at the lag that they name, keeps what is finished, and writes its tables."""

from pathlib import Path

import msgspec
import pytest

from bench.study import __main__ as command
from bench.study import cells
from bench.study.cells import (
    GRID_SEED,
    METHODS,
    OBJECTIVES,
    StudyCell,
    every_cell,
    grid,
    objectives_grid,
    read_results,
    settings,
    write_results,
)
from bench.study.loop import run_cell
from bench.study.page import PAGE, present, render
from penstock.consumers.learning.interfaces import Objective, check_objective
from penstock.consumers.learning.learner.learner import Learner
from penstock.schemas.process.plugins import construct

CELL = StudyCell(pace="fast", lag=2, method="truncate", seed=GRID_SEED)


def test_what_is_published_is_every_cell_with_its_present_settings():
    results = read_results()
    assert set(grid()) <= set(results) <= set(every_cell())
    assert all(result.settings == settings(cell, cell.config(Path("models"))) for cell, result in results.items())
    assert render(results) in PAGE.read_text(encoding="utf-8")


def test_every_objective_at_every_lag_has_three_cells_that_its_learner_accepts():
    planned = objectives_grid()
    assert len(set(planned)) == len(planned) == len(OBJECTIVES) * 3 * 3
    assert len({cell.name for cell in every_cell()}) == len(every_cell())
    for cell in planned:
        config = cell.config(Path("models"))
        check_objective(config, construct(config.objective, "objective", Objective))
    results = read_results()
    finished = results | {cell: msgspec.structs.replace(results[grid()[0]], cell=cell) for cell in planned}
    assert "not finished" not in render(finished) and "not finished" in render({cell: results[cell] for cell in grid()})


def test_a_table_says_which_methods_one_is_above_in_every_seed(tmp_path):
    """GSPO's wide clip beats everything in one seed more; then it no longer does."""
    results = read_results()
    row = next(line for line in render(results).splitlines() if line.startswith("| 4 |"))
    assert row.endswith("| 1, 2, 3 |")
    worst = next(
        cell for cell in results if (cell.pace, cell.lag, cell.method, cell.seed) == ("fast", 16, "gspo-wide", 2)
    )
    results[worst] = msgspec.structs.replace(results[worst], accuracy=[(0, 0.4), (10, 0.0)])
    row = next(line for line in render(results).splitlines() if line.startswith("| 4 |"))
    assert row.endswith("|  |")
    page = tmp_path / "page.md"
    page.write_text("before\n")
    with pytest.raises(cells.ConfigError, match=r"page\.md: expected <!-- study"):
        present(results, page)


def test_a_cell_is_trained_at_its_lag_kept_and_not_trained_again(demo_model, tmp_path, monkeypatch, capsys):
    def config(cell, models, num_updates=3):
        overrides = (
            "groups_per_batch=2",
            "evaluation.every=2",
            f"model.path={demo_model}",
            *cell.method_used.overrides,
        )
        return cells.load_config(cells.RUN_FILE, ["name=s", f"num_updates={num_updates}", *overrides])

    file = tmp_path / "study.jsonl"
    monkeypatch.setattr(StudyCell, "config", config)
    monkeypatch.setattr(command, "read_results", lambda: read_results(file))
    monkeypatch.setattr(command, "write_results", lambda results: write_results(results, file))
    monkeypatch.setattr(command, "make_model", lambda *arguments, **options: None)
    lags = []
    for cell in (CELL, msgspec.structs.replace(CELL, lag=0, method="centering")):
        pack = Learner.pack

        def kept(self, groups, lag_of, pack=pack):
            lags.append(lag_of(groups[0].rollouts[0].segments[0].version_spans[0].version))
            return pack(self, groups, lag_of)

        with monkeypatch.context() as patched:
            patched.setattr(Learner, "pack", kept)
            result = run_cell(cell, config(cell, tmp_path, num_updates=4))
        assert [update for update, _ in result.accuracy] == [0, 2, 4]
    assert result.mean_ess > 0.9999, "the sampler and the trainer agree on equal weights"
    assert lags == [0, 1, 2, 2, 0, 0, 0, 0]
    name = f"fast-lag1-{METHODS[0].name}"
    assert command.main(["--only", name]) == 0 and list(read_results(file)) == [c for c in grid() if name in c.name]
    assert "not finished" in capsys.readouterr().out
    assert command.main(["--only", name]) == 0
    assert "1 of 1 cells are finished" in capsys.readouterr().out
    assert command.main(["--only", "nonsense"]) == 2
