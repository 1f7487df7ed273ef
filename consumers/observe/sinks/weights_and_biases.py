"""A run at Weights & Biases."""

import os
import uuid
from pathlib import Path

import msgspec

from penstock.consumers.observe.sinks.points import COLUMNS, KeptRun, SinkPoint
from penstock.schemas.config import WANDB_OFFLINE, RunConfig, WandbConfig


class WeightsAndBiases:
    """One W&B run for all trainers of a run: `wandb.json` keeps its id. The step is the update.

    Online, updates that W&B has are not sent again after a resume. Offline it is unknown what the server has: each
    trainer leaves a folder of its own under `wandb/`, all with one id, and a repeated update is in several.

    Raises:
        Exception: no key, no server.
    """

    def __init__(self, wandb: WandbConfig, config: RunConfig, run_folder: Path) -> None:
        os.environ["WANDB_SILENT"] = "true"
        import wandb as package

        kept = KeptRun(run_folder / "wandb.json")
        if not kept.id:
            kept.keep(uuid.uuid4().hex[:8])
        self._table = package.Table
        self._run = package.init(
            project=wandb.project,
            name=config.name,
            id=kept.id,
            # Offline the server cannot be asked, and `wandb sync` goes by the id.
            resume=None if os.environ.get("WANDB_MODE") in WANDB_OFFLINE else "allow",
            dir=run_folder,
            config=msgspec.to_builtins(config),
            settings=package.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric("evaluation/*", step_metric="evaluation/update")
        self._step: int = self._run.step
        """W&B drops rows of an earlier step."""
        self._last_update = self._step - 1
        """The last update on the server."""

    def write(self, point: SinkPoint) -> None:
        if point.kind == "evaluations":
            # It follows its update's own line, and W&B takes steps in order, so it has an axis of its own.
            named = {f"evaluation/{name}": value for name, value in point.numbers.items()}
            self._log({**named, "evaluation/update": point.update}, point.update)
        elif point.update > self._last_update:
            self._last_update = point.update
            self._log(point.numbers, point.update)
            if point.completions:
                self._run.log(
                    {"completions": self._table(columns=list(COLUMNS), data=[list(row) for row in point.completions])},
                    step=self._step,
                )

    def _log(self, numbers: dict[str, float], update: int) -> None:
        self._step = max(self._step, update)
        self._run.log(numbers, step=self._step)

    def close(self) -> None:
        self._run.finish()
