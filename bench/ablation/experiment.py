"""An ablation as an experiment."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.ablation.figures import draw_figures
from bench.ablation.page import render
from bench.ablation.plan import AblationCell, AblationPlan, load_plan
from bench.ablation.results import AblationResult
from bench.ablation.runner import run_cell
from bench.experiments.experiment import Experiment
from penstock.deploy.demo.make_model import ModelRecipe
from penstock.schemas.config import RunConfig

PLANS = {name: Path(__file__).with_name(f"{name}.toml") for name in ("ablation", "ablation-prefix")}


class Ablation(Experiment[AblationCell, AblationResult]):
    """Every cell is a `penstock run`, in a folder under `runs`."""

    result_type = AblationResult

    def __init__(self, plan: AblationPlan, runs: Path) -> None:
        self.name = plan.name
        self.results = plan.results
        self.page = plan.page
        self._plan = plan
        self._runs = runs / plan.name

    @classmethod
    def load(cls, file: Path, runs: Path) -> "Ablation":
        """Reads the ablation that a TOML file describes. Raises ConfigError, see `load_plan`."""
        return cls(load_plan(file), runs)

    def cells(self, *, gpu: bool) -> list[AblationCell]:
        return self._plan.cells(gpu=gpu)

    def config(self, cell: AblationCell, *, gpu: bool) -> RunConfig:
        return self._plan.config(cell, gpu=gpu)

    def settings(self, cell: AblationCell, *, gpu: bool) -> dict[str, Any]:
        return self._plan.settings(cell, gpu=gpu)

    def recipe(self, cell: AblationCell) -> ModelRecipe | None:
        return self._plan.recipe

    def run(self, cell: AblationCell, *, gpu: bool, on_update: Callable[[int], None]) -> AblationResult:
        return run_cell(self._plan, cell, self._runs, gpu=gpu, on_update=on_update)

    def tables(self, results: Sequence[AblationResult]) -> str:
        return render(self._plan, results)

    def draw(self, results: Sequence[AblationResult]) -> list[Path]:
        return draw_figures(self._plan, results)
