"""The study as an experiment."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.experiments.experiment import Experiment
from bench.study.cells import NUM_UPDATES, StudyCell, StudyResult, grid, settings
from bench.study.figures import draw_curves
from bench.study.loop import run_cell
from bench.study.page import render
from bench.study.pictures import draw_pictures
from penstock.deploy.demo.make_model import ModelRecipe
from penstock.schemas.config import RunConfig

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "corrections.md"


class Study(Experiment[StudyCell, StudyResult]):
    """Trains in this process and on the CPU alone, whatever the machine has.

    runs: folder of all runs; models are made in `models` below it.
    """

    name = "study"
    result_type = StudyResult

    def __init__(
        self, runs: Path, *, results: Path = RESULTS, page: Path = PAGE, num_updates: int = NUM_UPDATES
    ) -> None:
        self.results = results
        self.page = page
        self._models = runs / "models"
        self._num_updates = num_updates

    def cells(self, *, gpu: bool) -> list[StudyCell]:
        return grid()

    def config(self, cell: StudyCell, *, gpu: bool) -> RunConfig:
        return cell.config(self._models, self._num_updates)

    def settings(self, cell: StudyCell, *, gpu: bool) -> dict[str, Any]:
        return settings(cell, self.config(cell, gpu=gpu))

    def recipe(self, cell: StudyCell) -> ModelRecipe:
        return cell.recipe

    def run(self, cell: StudyCell, *, gpu: bool, on_update: Callable[[int], None]) -> StudyResult:
        return run_cell(cell, self.config(cell, gpu=gpu), on_update)

    def tables(self, results: Sequence[StudyResult]) -> str:
        return render(results)

    def draw(self, results: Sequence[StudyResult]) -> list[Path]:
        folder = self.page.parent
        return [*draw_pictures(folder), *draw_curves(results, folder)]
