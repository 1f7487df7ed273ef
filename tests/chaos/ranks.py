"""A trainer of several ranks: its settings, the process that starts them, and the program of each."""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

import penstock.consumers.__main__ as lead
import penstock.consumers.distributed.led_rank as led_rank
import penstock.consumers.distributed.start as start
import penstock.consumers.learning.model.tensor_files as tensor_files
from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.stop_signals import StoppedError, StopSignals
from penstock.deploy import cli
from penstock.deploy.launch.run_folder import resolved_toml
from penstock.schemas.config import ObjectivePlug, Plug, RunConfig, TrainerConfig
from penstock.schemas.process.files import write_whole
from tests.chaos.aim import Target
from tests.chaos.roles import BROKEN, shorten_waits
from tests.chaos.witness import observed_learner

NUM_RANKS = 2
RANK_TIMEOUT_S = 6.0


def of_ranks(config: RunConfig, aims: Path) -> RunConfig:
    """Returns the configuration for a trainer of `NUM_RANKS` whose objective and optimizer look for aims."""
    aimed = {"folder": str(aims), "timeout_s": RANK_TIMEOUT_S}
    trainer = TrainerConfig(
        learning_rate=config.trainer.learning_rate,
        optimizer=Plug(path="tests.chaos.aim:AimedAdamW", kwargs={**aimed, "weight_decay": 0.0, "fused": True}),
        device="cpu",
        lease_s=config.trainer.lease_s,
        num_processes=NUM_RANKS,
        rank_timeout_s=RANK_TIMEOUT_S,
    )
    return replace(config, trainer=trainer, objective=ObjectivePlug(path="tests.chaos.aim:AimedGrpo", kwargs=aimed))


def train(
    config: RunConfig, file: Path, runs: Path, *, resume: bool, standby: bool, steps: Path, broken: str | None
) -> int:
    """Does what `penstock trainer` does for a run file with `num_processes`, with observed ranks that are forked."""
    write_whole(file, resolved_toml(config))
    command = ["trainer", str(file), "--runs", str(runs)] + ["--resume"] * resume + ["--standby"] * standby
    start.subprocess = SimpleNamespace(Popen=_ForkedRank)  # type: ignore[assignment]
    signals = StopSignals()
    try:
        return start.launch(config.trainer.num_processes, [str(steps), broken or "", *command], signals.hand_to)
    except StoppedError:
        return 0
    finally:
        signals.ignore()


class _ForkedRank:
    """A rank with the methods of Popen that the launcher uses. Like a Popen it inherits no descriptor of the launcher
    but its output, so that the launcher's death closes the ranks' store."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self._pid = os.fork()
        if not self._pid:
            _be_a_rank(arguments, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(start.TICK_S)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self._pid, number)


def _be_a_rank(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(environment)
        steps, broken, *command = arguments
        lead.Learner = led_rank.Learner = _aimed_learner(Path(steps))  # type: ignore[misc]
        shorten_waits()
        if broken:
            BROKEN[broken]()
        status = cli.main(command)
    except StoppedError:  # the launcher's handler, before the first line
        status = 0
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)


def _aimed_learner(steps: Path) -> Any:
    observed: Any = observed_learner(steps)

    class AimedLearner(observed):
        """A learner that can be hit where the lead has packed a batch and the others wait for it, and where a rank has
        written its part of a checkpoint that the others do not know of yet."""

        def __init__(self, config: RunConfig, *arguments: Any) -> None:
            super().__init__(config, *arguments)
            self._target = Target(**config.objective.kwargs)
            fsync = tensor_files.fsync

            def aimed_fsync(path: Path) -> None:
                self._target.at("checkpoint")
                fsync(path)

            tensor_files.fsync = aimed_fsync

        def step(self, batch: Batch) -> StepReport:
            self._target.at("between steps")
            report: StepReport = super().step(batch)
            return report

    return AimedLearner
