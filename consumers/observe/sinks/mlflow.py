"""A run of MLflow."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.consumers.observe.sinks.points import COLUMNS, KeptRun, SinkPoint
from penstock.schemas.config import MlflowConfig, RunConfig

_MOST_PARAMS = 100
"""Of one request."""
_MOST_CHARACTERS = 6000
"""Of a parameter's value."""


class Mlflow:
    """One MLflow run for all trainers of a run: `mlflow.json` keeps its id and last update, which is not sent again
    after a resume. The step is the update, settings are parameters, and what MLflow takes in no name is `_`.

    Raises:
        Exception: the store or the server refuses.
    """

    def __init__(self, mlflow: MlflowConfig, config: RunConfig, run_folder: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # it is opened again later anyway
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient()
        self._kept = KeptRun(run_folder / "mlflow.json")
        if self._kept.id:
            self._client.update_run(self._kept.id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(mlflow.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(mlflow.experiment)
        self._kept.keep(self._client.create_run(experiment, run_name=config.name).info.run_id)
        params = [Param(name, value[:_MOST_CHARACTERS]) for name, value in _flat(msgspec.to_builtins(config))]
        for n in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._kept.id, params=params[n : n + _MOST_PARAMS])

    def write(self, point: SinkPoint) -> None:
        is_evaluation = point.kind == "evaluations"
        if not is_evaluation and not self._kept.takes(point.update):
            return
        prefix, time_ms = "evaluation/" if is_evaluation else "", round(point.time_s * 1000)
        metrics = [
            self._metric(_name(prefix + name), value, time_ms, point.update) for name, value in point.numbers.items()
        ]
        self._client.log_batch(self._kept.id, metrics=metrics)
        if point.completions:  # as MLflow's own tables are stored
            table = {"columns": list(COLUMNS), "data": [list(row) for row in point.completions]}
            self._client.log_dict(self._kept.id, table, f"completions/{point.update:06}.json")

    def close(self) -> None:
        self._client.set_terminated(self._kept.id)


def _name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _flat(settings: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(settings, dict) and (settings or not name):
        for key, value in settings.items():
            yield from _flat(value, f"{name}.{key}" if name else key)
    else:
        yield _name(name), str(settings)
