"""A short run for tests of the operator's commands: a real trainer and real streams, a scripted learner, and producers
in threads."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock.consumers.__main__ as entry
from mini_producer import MiniProducer
from penstock.consumers.observe.metrics import TrainerMetrics
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.trainer import Trainer
from penstock.deploy import cli
from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.config import (
    CheckpointConfig,
    EnvironmentConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    ParityConfig,
    RunConfig,
)
from penstock.schemas.keys import Keys
from scripted_learner import ScriptedLearner
from trainer_bench import commit_at_once


class ShortRun:
    """A run named `test` of 12 updates of 4 groups, max_lag 2, a checkpoint every 4 updates."""

    def __init__(self, url: str, runs: Path, monkeypatch: Any, **changes: Any) -> None:
        monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
        monkeypatch.setenv("REDIS_URL", url)
        fields: dict[str, Any] = {
            "name": "test",
            "num_updates": 12,
            "groups_per_batch": 4,
            "group_size": 2,
            "model": ModelConfig(path="none"),
            "environment": EnvironmentConfig(path="none:None"),
            "evaluation": EvaluationConfig(every=5, num_prompts=3),
            "checkpoint": CheckpointConfig(every=4),
            "metrics": MetricsConfig(port=0),
            "parity": ParityConfig(gate="off"),  # the producer's logprobs are invented
        } | changes
        self.url = url
        self.runs = runs
        self.config = RunConfig(**fields)
        self.folder = self.config.folder(runs)
        self.keys = Keys(self.config.name)
        save_run_file(self.config, self.folder)
        self._closing: list[Callable[[], Any]] = []
        self._producers: list[MiniProducer] = []

    def trainer(self, *, resume: bool = False, fail_at: dict[int, Any] | None = None) -> Trainer:
        """Opens a trainer. fail_at: see ScriptedLearner."""
        connection = TrainerConnection(self.url, outage_s=20)
        trainer = entry.open_trainer(self.config, self.runs, connection, TrainerMetrics(), resume=resume)
        assert trainer is not None
        commit_at_once(trainer)
        trainer.learner.fail_at.update(fail_at or {})
        self._closing += [trainer.close, connection.close]
        return trainer

    def producer(self, answer: Callable[[int, int], dict] | None = None) -> MiniProducer:
        """Starts a producer."""
        producer = MiniProducer(self.url, self.config.name, answer, self.config.lag_bound)
        producer.start()
        self._producers.append(producer)
        return producer

    def end_producers(self) -> None:
        for producer in self._producers:
            producer.stop.set()
            producer.join()
            producer.client.close()
        self._producers.clear()

    def train(self, trainer: Trainer) -> threading.Thread:
        """Runs a trainer in a thread, which `close` stops."""
        thread = threading.Thread(target=trainer.run)
        thread.start()
        self._closing.insert(0, thread.join)
        self._closing.insert(0, trainer.stop)
        return thread

    def ledger(self) -> dict[str, Any]:
        return json.loads((self.folder / "trainer.json").read_text())

    def command(self, capsys: Any, *argv: str) -> tuple[int, str, str]:
        """Runs `penstock ARGV --runs RUNS`; returns its status, output and errors."""
        capsys.readouterr()
        status = cli.main([*argv, "--runs", str(self.runs)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    def json(self, capsys: Any, *argv: str) -> Any:
        """Runs `penstock ARGV --runs RUNS --json`; returns its decoded output."""
        _, out, err = self.command(capsys, *argv, "--json")
        assert err == ""
        return json.loads(out)

    def close(self) -> None:
        self.end_producers()
        for close in self._closing:
            close()
