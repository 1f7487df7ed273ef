"""Child processes that end with this one."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.schemas.process.logs import line_as_text

_LAST_LINES = 15
_LOG_BYTES = 65536
_MOST_CHARACTERS = 2000
_NUMBERS = re.compile(r"\d+")
_RECORD = re.compile(r"(\d{4}-\S+ \S+) ([A-Z]+) \S+ (?:v[\d:]+ )?(.*)")
"""A line of `penstock.schemas.process.logs.as_text`: time, level, message."""
_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec nothing may be loaded.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Child:
    """A process in a session of its own, its output appended to `log`.

    `death_signal` is its parent-death signal: the kernel sends it when the thread that started the process ends, so
    children are started from the main thread. The process's group is killed once the process has ended.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
        standard_input: bytes | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        self.returncode: int | None = None
        parent = os.getpid()

        def die_with_parent() -> None:
            if _LIBC is not None:
                _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
                if os.getppid() != parent:  # the parent died before prctl took effect
                    os._exit(1)

        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        self.started_s = time.time()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL if standard_input is None else subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.pid = self._process.pid
        if self._process.stdin is not None and standard_input is not None:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # it has ended; poll() says so
                pipe.write(standard_input)

    def poll(self) -> int | None:
        """Returns the exit status (negative: a signal), None while it runs."""
        if self.returncode is None:
            try:
                # WNOWAIT: its process id, and so its group's, is not reused before it is reaped.
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped elsewhere
                ended = True  # type: ignore[assignment]
            if ended is not None:
                self.kill()
                self.returncode = self._process.wait()
        return self.returncode

    def send(self, number: signal.Signals) -> None:
        """Signals the process itself, not its group."""
        if self.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL to the whole group."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
                os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills the whole group and waits until the process has ended."""
        self.kill()
        while self.poll() is None:
            time.sleep(0.003)

    def last_lines(self) -> str:
        """Returns the end of this process's log, its JSON records as text. The last of several lines in a row that
        differ in their numbers only stands for all."""
        lines: list[str] = []
        for line in self._end_of_log():
            if lines and _NUMBERS.sub("", lines[-1]) == _NUMBERS.sub("", line):
                lines.pop()
            lines.append(line)
        return "\n".join(lines[-_LAST_LINES:])

    def last_error(self) -> str:
        """Returns the last error that this process has logged, in one line; empty if it has logged none."""
        found = (_RECORD.match(line) for line in reversed(self._end_of_log()))
        errors = (match[3] for match in found if match and match[2] in ("ERROR", "CRITICAL"))
        return next(errors, "")[:_MOST_CHARACTERS]

    def last_record(self, since_s: float) -> str:
        """Returns the message that this process has logged last, if at `since_s` (unix time) or later; else empty."""
        found = (_RECORD.match(line) for line in reversed(self._end_of_log()))
        match = next(filter(None, found), None)
        is_new = match is not None and match[1] >= time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(since_s))
        return match[3] if match is not None and is_new else ""

    def is_suspended(self) -> bool:
        """Returns whether a signal such as SIGSTOP keeps the process from running."""
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        return False

    def _end_of_log(self) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:  # someone has removed the run's folder
            return []
        return "\n".join(map(line_as_text, lines)).splitlines()


def describe_status(returncode: int) -> str:
    """Returns `ended with status 1`, `was killed by SIGKILL`, and so on."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
