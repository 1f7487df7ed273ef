"""Starts trainers of a bench's run as processes, through the command line."""

import os
import subprocess
from pathlib import Path

from forked_programs import PYTHONPATH, ForkedProgram, start_program
from trainer_bench import TrainerBench
from waiting import wait_for

SLOW_STEPS = """
class Learner(ScriptedLearner):
    def step(self, batch):
        time.sleep(0.02)
        return super().step(batch)
"""

_PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from scripted_learner import ScriptedLearner
import penstock.consumers.__main__ as entry
from penstock.deploy.cli import main
{learner}
entry.load_learner = Learner
sys.exit(main(sys.argv[1:]))
"""

BARE = """
import sys, time
from pathlib import Path
from penstock.deploy.cli import main
{setup}
sys.exit(main(sys.argv[1:]))
"""
"""A program for a fresh process: it imports nothing heavy before the command line does."""


def with_learner(learner: str = SLOW_STEPS) -> str:
    """Returns a program whose trainer uses the class `Learner` that the given lines define."""
    return _PROGRAM.format(learner=learner)


class TrainerProcesses:
    """Starts trainer processes, which `close` ends. They write to `<log>.log` in the folder of all runs."""

    def __init__(self, bench: TrainerBench) -> None:
        self._bench = bench
        self._processes: list[subprocess.Popen | ForkedProgram] = []

    def start(
        self, log: str, *arguments: str, program: str | None = None, fresh: bool = False
    ) -> subprocess.Popen | ForkedProgram:
        """Starts a trainer. fresh: the process imports everything itself."""
        bench = self._bench
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "REDIS_URL": bench.url, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("PENSTOCK_LOG", "text")
        command = ["trainer", str(bench.file), "--runs", str(bench.runs), *arguments]
        for override in bench.overrides:
            command += ["--set", override]
        self._processes.append(
            start_program(program or with_learner(), command, environment, bench.runs / f"{log}.log", fresh=fresh)
        )
        return self._processes[-1]

    def log(self, name: str) -> str:
        return (self._bench.runs / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def wait_until_stopped(process: subprocess.Popen | ForkedProgram) -> None:
    """Waits until a process has stopped itself by SIGSTOP."""
    state = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
