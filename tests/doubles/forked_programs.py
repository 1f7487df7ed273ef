"""Python programs in processes of their own, forked from a server process that has imported torch and penstock.

Each has its own environment, arguments, log, signals and exit status, as if a shell had started it; only the imports,
which are most of a start, are shared.
"""

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import current_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from forked_engines import begin

PRELOADED = ["penstock.deploy.cli", "penstock.producers.__main__", "penstock.consumers.__main__"]
PRELOADED += ["penstock.consumers.learning.learner", "transformers.models.qwen3.modeling_qwen3"]


class _Server(forkserver.ForkServer):
    """Of its own: that of multiprocessing forks the engines. A program that was forked itself asks the same server."""

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(PRELOADED)
        inherited = forkserver._forkserver  # type: ignore[attr-defined]
        self._is_anothers = inherited.get_inherited_fds() is not None
        if self._is_anothers:
            self._forkserver_address = inherited._forkserver_address
            self._forkserver_alive_fd = inherited._forkserver_alive_fd

    def ensure_running(self) -> None:
        if not self._is_anothers:
            super().ensure_running()


_server = _Server()


class ForkedProgram(ForkServerProcess):
    """A running program, with the methods of a Popen."""

    def __init__(self, text: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        super().__init__(daemon=True)
        log.touch()
        self._program = text, list(arguments), log
        self._environment = dict(environment)
        ends = SimpleNamespace(
            connect_to_new_process=_server.connect_to_new_process, read_signed=forkserver.read_signed
        )
        with mock.patch.object(popen_forkserver, "forkserver", ends):
            self.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return begin, (type(self), self._environment), self.__dict__

    def run(self) -> None:
        text, arguments, log = self._program
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["-c", *arguments]
        try:
            exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
        finally:
            atexit._run_exitfuncs()  # which a process of multiprocessing leaves out

    @property
    def returncode(self) -> int | None:
        """The exit status (negative: the signal), None while it runs."""
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired("program", timeout or 0.0)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        if self.exitcode is None:
            assert self.pid is not None
            os.kill(self.pid, number)


def fork_ranks() -> None:
    """In a launcher of ranks: they are forked, too, write to its output, and leave their process ids in files."""
    from penstock.consumers.distributed import start

    def fork(command: Sequence[str], env: Mapping[str, str]) -> ForkedProgram:
        assert list(command[:3]) == [sys.executable, "-m", "penstock.deploy.cli"]
        program = "import sys; from penstock.deploy.cli import main; sys.exit(main(sys.argv[1:]))"
        log = Path(os.readlink("/proc/self/fd/1"))
        rank = ForkedProgram(program, command[3:], env, log)
        rank_file(log.parent, os.getpid(), env["RANK"]).write_text(str(rank.pid))
        return rank

    current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start processes
    start.subprocess = SimpleNamespace(Popen=fork)  # type: ignore[assignment]


def rank_file(folder: Path, launcher: int | None, rank: int | str) -> Path:
    return folder / f"rank-{rank}-of-{launcher}"


def start_program(
    text: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, *, fresh: bool
) -> subprocess.Popen | ForkedProgram:
    """Starts a program whose output is appended to `log`; a fresh one imports everything itself."""
    if not fresh:
        return ForkedProgram(text, arguments, environment, log)
    with log.open("ab") as output:
        command = [sys.executable, "-c", text, *arguments]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)
