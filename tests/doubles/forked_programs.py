"""Runs Python programs in processes forked from a server process that has imported torch and penstock; whole runs with
engines are forked from one that has imported vLLM, too.

Each has its own environment, arguments, log, signals and exit status, as if a shell had started it; only the imports,
which take most of a start, are shared.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkProcess, ForkServerProcess
from multiprocessing.process import current_process
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

import forked_engines
from forked_engines import begin

PYTHONPATH = os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parent)))
"""Where a program finds the rooms, the tests and the doubles."""
PRELOADED = ["penstock.deploy.cli", "penstock.producers.__main__", "penstock.consumers.__main__"]
PRELOADED += ["penstock.consumers.learning.learner.learner", "transformers.models.qwen3.modeling_qwen3"]


class _Server(forkserver.ForkServer):
    """A fork server apart from multiprocessing's, which forks the engines. A program that was itself forked uses the
    same server."""

    def __init__(self, preloaded: list[str]) -> None:
        super().__init__()
        self.set_forkserver_preload(preloaded)
        inherited = forkserver._forkserver  # type: ignore[attr-defined]
        self._is_inherited = inherited.get_inherited_fds() is not None
        if self._is_inherited:
            self._forkserver_address = inherited._forkserver_address
            self._forkserver_alive_fd = inherited._forkserver_alive_fd

    def ensure_running(self) -> None:
        if not self._is_inherited:
            super().ensure_running()

    def patched(self) -> Any:
        """Returns a patch: while it is active, processes are forked from this server."""
        ends = SimpleNamespace(connect_to_new_process=self.connect_to_new_process, read_signed=forkserver.read_signed)
        return mock.patch.object(popen_forkserver, "forkserver", ends)


_server = _Server(PRELOADED)
_server_of_runs = _Server(PRELOADED + forked_engines.PRELOADED)


class ForkedProgram(ForkServerProcess):
    """A running program with the methods of a Popen.

    errors: the file for its standard error, if not `log`.
    """

    def __init__(
        self,
        text: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        errors: Path | None = None,
        server: _Server = _server,
    ) -> None:
        super().__init__(daemon=True)
        log.touch()
        self._program = text, list(arguments), log, errors or log
        self._environment = dict(environment)
        with server.patched():
            self.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return begin, (type(self), self._environment), self.__dict__

    def run(self) -> None:
        text, arguments, *outputs = self._program
        for number, file in enumerate(outputs, start=1):
            output = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(output, number)
            os.close(output)
        _write_through()
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["-c", *arguments]
        with _exit_functions():
            exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})

    @property
    def returncode(self) -> int | None:
        """The exit status (negative: the signal), or None while it runs."""
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


@contextlib.contextmanager
def _exit_functions() -> Iterator[None]:
    """Runs the functions registered with `atexit` at the end, which a process of multiprocessing omits."""
    try:
        yield
    finally:
        atexit._run_exitfuncs()


def _allow_children() -> None:
    """Lets this process start others, which multiprocessing forbids to daemons."""
    current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _write_through() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def fork_ranks() -> None:
    """Called in a launcher of ranks: forks them, too. They write to its output and leave their process ids in files."""
    from penstock.consumers.distributed import start

    def fork(command: Sequence[str], env: Mapping[str, str]) -> ForkedProgram:
        assert list(command[:3]) == [sys.executable, "-m", "penstock.deploy.cli"]
        program = "import sys; from penstock.deploy.cli import main; sys.exit(main(sys.argv[1:]))"
        log = Path(os.readlink("/proc/self/fd/1"))
        rank = ForkedProgram(program, command[3:], env, log)
        rank_file(log.parent, os.getpid(), env["RANK"]).write_text(str(rank.pid))
        return rank

    _allow_children()
    start.subprocess = SimpleNamespace(Popen=fork)  # type: ignore[assignment]


FORKING = "from forked_programs import fork_parts\nfork_parts()\n"
PENSTOCK = "import sys\nfrom penstock.deploy.cli import main\nsys.exit(main())"


def start_run(
    text: str, arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path | None = None
) -> ForkedProgram:
    """Starts a program that starts runs. Their parts are forked from it, and engines from its server."""
    return ForkedProgram(FORKING + text, arguments, environment, output, errors=errors, server=_server_of_runs)


def start_penstock(
    arguments: Sequence[str], environment: Mapping[str, str], output: Path, errors: Path | None = None
) -> ForkedProgram:
    """Starts `penstock ARGUMENTS` as `start_run` does."""
    return start_run(PENSTOCK, arguments, environment, output, errors)


class _ForkedPart(ForkProcess):
    """A `penstock` command that a program starts, as a forked child that shares the program's imports."""

    def __init__(
        self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], preexec_fn: Callable[[], None]
    ) -> None:
        super().__init__()
        self._command = list(command)
        self._stdout, self._env, self._prepare = stdout, env, preexec_fn
        self.stdin = None
        self.start()

    def run(self) -> None:
        from penstock.deploy.cli import main

        os.setsid()
        self._prepare()
        for number in (1, 2):
            os.dup2(self._stdout.fileno(), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(self._env)
        atexit._clear()  # functions that the launcher has registered
        sys.argv = self._command[2:]
        with _exit_functions():
            sys.exit(main())

    def wait(self) -> int:
        self.join()
        assert self.exitcode is not None
        return self.exitcode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)


def fork_parts() -> None:
    """Called in a program: forks the runs that it starts, their parts and engines; other children are executed."""
    from penstock.deploy.launch import child

    def start(command: Sequence[str], **options: Any) -> Any:
        if list(command[:3]) != [sys.executable, "-m", "penstock.deploy.cli"]:
            return subprocess.Popen(command, **options)
        wanted = {name: options[name] for name in ("stdout", "env", "preexec_fn")}
        return _ForkedPart(command, **wanted)

    _allow_children()
    child.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=start, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE
    )
    _server.patched().start()
    forked_engines.patched().start()


def rank_file(folder: Path, launcher: int | None, rank: int | str) -> Path:
    """Returns the file with the process id of a rank that `fork_ranks` has forked."""
    return folder / f"rank-{rank}-of-{launcher}"


def start_program(
    text: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, *, fresh: bool
) -> subprocess.Popen | ForkedProgram:
    """Starts a program that appends its output to `log`; a fresh one imports everything itself."""
    if not fresh:
        return ForkedProgram(text, arguments, environment, log)
    with log.open("ab") as output:
        command = [sys.executable, "-c", text, *arguments]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)
