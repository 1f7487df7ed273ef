"""Runs a command at a terminal: reads its frames, presses keys, changes the size."""

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
_HOME = "\x1b[H"


class Terminal:
    """A command with a pty as its terminal; `close` ends it."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], width: int, height: int = 50) -> None:
        self._far, near = os.openpty()
        self.attributes = termios.tcgetattr(near)
        self._near = near
        self.resize(width, height)
        self.process = subprocess.Popen(
            list(command), stdin=near, stdout=near, stderr=near, env=dict(environment), start_new_session=True
        )
        self.output = ""

    def resize(self, width: int, height: int = 50) -> None:
        fcntl.ioctl(self._near, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, key: str) -> None:
        os.write(self._far, key.encode())

    def read(self, timeout_s: float = 0.1) -> None:
        """Reads output until none comes, waiting at most `timeout_s` for the first."""
        while select.select([self._far], [], [], timeout_s)[0]:
            try:
                data = os.read(self._far, 65536)
            except OSError:  # the other end is closed
                return
            self.output += data.decode(errors="replace")
            timeout_s = 0

    @property
    def frames(self) -> list[list[str]]:
        """The lines of each frame drawn, oldest first, without colours; the last may be incomplete."""
        return [
            [line.rstrip() for line in _CONTROL.sub("", frame).replace("\r", "").split("\n")]
            for frame in self.output.split(_HOME)[1:]
        ]

    def wait_for(self, condition: Callable[[list[str]], object], timeout_s: float = 60.0) -> list[str]:
        """Waits for the first complete frame drawn from now on that fulfills `condition`; returns it."""
        seen = max(0, len(self.frames) - 1)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.read()
            for frame in self.frames[seen:-1]:
                if condition(frame):
                    return frame
            if self.process.poll() is not None:
                break
        raise AssertionError(f"not seen after {timeout_s} s; the end: {self.output[-3000:]!r}")

    def wait(self, timeout_s: float = 60.0) -> int:
        """Waits for the end of the command; returns its exit status."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
        self.read()
        return self.process.wait(1)

    def attributes_now(self) -> list:
        """Returns the terminal's present attributes."""
        return termios.tcgetattr(self._near)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._far)
        os.close(self._near)
