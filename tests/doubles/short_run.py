"""A short run for tests of the operator's commands: a real trainer and real streams, a scripted learner, and producers
in threads."""

import json
import threading
from pathlib import Path
from typing import Any

import msgspec

import penstock.consumers.__main__ as entry
from penstock.consumers.trainer import Trainer
from penstock.deploy import cli
from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.config import RunConfig
from scripted_learner import ScriptedLearner
from trainer_bench import TrainerBench


class ShortRun(TrainerBench):
    """A run named `test` of 12 updates of 4 groups, max_lag 2, a checkpoint every 4 updates. changes: fields of its
    configuration."""

    def __init__(self, url: str, runs: Path, monkeypatch: Any, **changes: Any) -> None:
        super().__init__(url, runs)
        monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
        monkeypatch.setenv("REDIS_URL", url)
        self._changes = changes
        self._training: list[tuple[Trainer, threading.Thread]] = []
        save_run_file(self.config, self.folder)

    @property
    def config(self) -> RunConfig:
        return msgspec.structs.replace(super().config, **self._changes)

    def train(self, trainer: Trainer) -> threading.Thread:
        """Runs a trainer in a thread, which `close` stops."""
        thread = threading.Thread(target=trainer.run)
        thread.start()
        self._training.append((trainer, thread))
        return thread

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
        for trainer, thread in self._training:
            trainer.stop()
            thread.join()
        super().close()
