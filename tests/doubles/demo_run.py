"""Runs the demo's own run file by its name, from a user's project."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from forked_programs import ForkedProgram, start_penstock, start_run
from process_family import holders_of_files
from waiting import wait_for

BOOT_S = 240.0
"""Allows for the boot of two engines on a busy machine."""
UNSET = ("COLUMNS", "LINES", "NO_COLOR", "PYTHONPATH")
VARIABLES = {name: value for name, value in os.environ.items() if name not in UNSET}
VARIABLES |= {"TERM": "xterm-256color", "PENSTOCK_LOG": "json"}
ROOMS = ("schemas", "producers", "consumers", "deploy")


def run_to_its_end(project: Path, *arguments: str, timeout_s: float) -> None:
    """Runs `penstock ARGUMENTS` in a project's folder; it must end with status 0."""
    output = project / "output"
    with contextlib.chdir(project):
        process = start_penstock(arguments, VARIABLES, output)
    try:
        assert process.wait(timeout_s) == 0, output.read_text()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


class DemoRun:
    """`penstock run demo --name NAME --runs FOLDER/runs`, with `settings` of the run file changed.

    It is started in a folder whose packages have the names of Penstock's rooms and fail when they are imported.

    fresh_lines: the log lines of the parts of a fresh run.
    """

    def __init__(self, folder: Path, name: str, **settings: object) -> None:
        self.name = name
        self.runs = folder / "runs"
        self.project = folder / "project"
        for room in ROOMS:
            package = self.project / room / "__init__.py"
            package.parent.mkdir(parents=True)
            package.write_text("raise ImportError('a folder of the user was taken for a part of Penstock')\n")
        self.folder = self.runs / name
        self._output = folder / "output"
        self._settings = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        self.process: subprocess.Popen[bytes] | ForkedProgram | None = None
        self.fresh_lines: dict[str, list[str]] = {}

    def start(self, *, fresh: bool) -> None:
        """Starts the run. A fresh one imports everything itself, as a user's does."""
        command = self.command("run", "demo", "--name", self.name, *self._settings)
        if fresh:
            with self._output.open("ab") as output:
                self.process = subprocess.Popen(command, cwd=self.project, env=VARIABLES, stdout=output, stderr=output)
        else:
            with contextlib.chdir(self.project):
                self.process = start_penstock(command[3:], VARIABLES, self._output)

    def resume_from_python(self, **settings: object) -> None:
        """Resumes the run from a user's program, whose callbacks write `seen.json`; `settings` replace those it was
        started with."""
        call = f"penstock.run('demo', name={self.name!r}, runs={str(self.runs)!r}, resume=True, set={settings!r}"
        program = [
            "import json, pathlib, penstock",
            "seen = {'updates': [], 'evaluations': []}",
            f"result = {call}, on_update=seen['updates'].append, on_evaluation=seen['evaluations'].append)",
            "assert result.model.is_dir()",
            "(result.folder / 'seen.json').write_text(json.dumps(seen))",
        ]
        with contextlib.chdir(self.project):
            self.process = start_run("\n".join(program), [], VARIABLES, self._output)

    def command(self, *arguments: str) -> list[str]:
        """Returns the command line `penstock ARGUMENTS --runs RUNS`."""
        return [sys.executable, "-m", "penstock.deploy.cli", *arguments, "--runs", str(self.runs)]

    def ask(self, *arguments: str) -> str:
        """Runs a command about this run; returns its output."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.project, env=VARIABLES, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def output(self) -> str:
        """Returns the output of the run and the ends of its logs."""
        logs = "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in self.folder.glob("logs/*.log"))
        return self._output.read_text() + logs

    def wait_for(self, condition: Callable[[], object]) -> None:
        # Conditions read whole files, and other processes need the processors.
        wait_for(condition, timeout_s=BOOT_S, poll_s=0.2, process=self.process, log=self.output)

    def wait_for_update(self, update: int) -> None:
        self.wait_for(lambda: any(line["update"] >= update for line in self.updates()[-1:]))

    def updates(self) -> list[dict]:
        file = self.folder / "updates.jsonl"
        # The last line may be incomplete.
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def log_lines(self, name: str) -> list[str]:
        """Returns the complete lines of a part's log."""
        lines = (self.folder / "logs" / f"{name}.log").read_text().splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]

    def read(self, name: str) -> dict:
        found: dict = json.loads((self.folder / name).read_text())
        return found

    def metrics(self, role: str) -> str:
        (group,) = json.loads((self.folder / "metrics" / f"{role}.json").read_text())
        with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=10) as reply:
            text: str = reply.read().decode()
        return text

    def living(self) -> list[int]:
        """Returns the ids of other processes that have a file of the run open."""
        return sorted(holders_of_files(self.folder) - {os.getpid()})

    def wait(self) -> int:
        """Waits for the end of the run; returns the exit status."""
        assert self.process is not None
        return self.process.wait(BOOT_S + 120)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(180)
