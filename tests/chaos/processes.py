"""Processes of the suite, forked from one that has imported everything: a start must take milliseconds, not seconds.

Each has its own session, log, signals and exit status; only the imports are shared.
"""

import contextlib
import ctypes
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Process:
    """A running child with its own log. It ends with the suite, however the suite ends."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name = name
        self.pid = pid
        self.log = log
        self.status: int | None = None
        self.is_stopped = False
        self.was_killed = False
        self.was_told_to_stop = False

    @classmethod
    def fork(cls, name: str, log: Path, environment: Mapping[str, str], body: Callable[[], int]) -> "Process":
        """Runs `body` in a child; its result is the exit status."""
        log.touch()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _be_a_child(parent, log, environment, body)
        return cls(name, pid, log)

    def poll(self) -> int | None:
        """Returns the exit status (negative: the signal), or None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills this process alone: what it has started must end by itself."""
        self.was_killed = True
        self.send(signal.SIGKILL)

    def freeze(self) -> None:
        self.is_stopped = True
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.is_stopped = False
        self.send(signal.SIGCONT)

    def tell_to_stop(self) -> None:
        self.was_told_to_stop = True
        self.send(signal.SIGTERM)

    def destroy(self) -> None:
        """Kills it with all that it has started, and waits."""
        self.was_killed = True
        self.send(signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.002)
        for pid in self.left_behind():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left_behind(self) -> list[int]:
        """Returns the processes that it started and that outlive it: they still have its log open."""
        return [] if self.poll() is None else [pid for pid in _writers_of(self.log) if pid != self.pid]

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _writers_of(log: Path) -> list[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        for number in ("1", "2"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if os.readlink(process / "fd" / number) == str(log):
                    found.add(int(process.name))
    return sorted(found)


def _die_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl took effect
        os._exit(1)


def _be_a_child(parent: int, log: Path, environment: Mapping[str, str], body: Callable[[], int]) -> None:
    status = 1
    try:
        os.setsid()
        _die_with(parent)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment)
        random.seed()  # siblings would share their jitter
        status = body()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
