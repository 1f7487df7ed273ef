"""A run of trackio."""

import os
import sys
import warnings
from pathlib import Path

import msgspec

from penstock.consumers.observe.sinks.points import COLUMNS, KeptRun, SinkPoint
from penstock.schemas.config import RunConfig, TrackioConfig


class TrackioError(RuntimeError):
    """What trackio says in a warning: it raises nothing that befalls its points."""


class Trackio:
    """One run of trackio for all trainers of a run: `trackio.json` keeps its name and last update, which is not sent
    again after a resume. The step is the update.

    Raises:
        TrackioError: points before this one could not be stored or sent.
        Exception: no such run, or no token.
    """

    def __init__(self, trackio: TrackioConfig, config: RunConfig, run_folder: Path) -> None:
        import trackio as package

        self._warnings: list[str] = []
        warnings.filterwarnings("always", message="trackio")
        warnings.showwarning = lambda message, *_: self._warnings.append(str(message))
        self._kept = KeptRun(run_folder / "trackio.json")
        self._table = package.Table
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, for colored advice, until this process ends
        self._run = package.init(
            project=trackio.project,
            name=self._kept.id or config.name,
            resume="must" if self._kept.id else "never",
            config=msgspec.to_builtins(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._kept.keep(self._run.name)

    def write(self, point: SinkPoint) -> None:
        self._raise_warnings()
        if point.kind == "evaluations":
            self._run.log({f"evaluation/{name}": value for name, value in point.numbers.items()}, step=point.update)
        elif self._kept.takes(point.update):
            rows: dict[str, object] = dict(point.numbers)
            if point.completions:
                rows["completions"] = self._table(columns=list(COLUMNS), data=[list(row) for row in point.completions])
            self._run.log(rows, step=point.update)

    def close(self) -> None:
        self._run.finish()
        self._raise_warnings()

    def _raise_warnings(self) -> None:
        said, self._warnings[:] = [text for text in self._warnings if text.startswith("trackio")], []
        if said:
            raise TrackioError(said[0])
