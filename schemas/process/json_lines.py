"""Files of JSON lines in the run's folder, for views and reports. A run does not depend on them."""

import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

MAX_WAITING_LINES = 1000
"""Most lines kept in memory while the disk is full; a line has one or two kilobytes."""


class JsonLines:
    """Appends JSON lines to a file of the run's folder. A line torn by a kill remains a separate line.

    While the disk is full, the latest `MAX_WAITING_LINES` lines wait for space. One warning is logged when that begins,
    another with the number of lost lines.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        # Unbuffered: a buffer would keep unwritten data, and fail again when it is closed.
        self._stream = file.open("a+b", buffering=0)
        self._is_torn = _ends_torn(self._stream.fileno())
        self._waiting: deque[bytes] = deque()
        self._is_stuck = False
        self._num_lost = 0

    def write(self, **fields: Any) -> None:
        self._waiting.append(json.dumps(fields, default=msgspec.to_builtins).encode() + b"\n")
        self._flush()
        if len(self._waiting) > MAX_WAITING_LINES:
            self._waiting.popleft()
            self._num_lost += 1

    def close(self) -> None:
        if self._stream.closed:
            return
        self._flush()
        self._num_lost += len(self._waiting)
        self._stream.close()
        self._log_loss()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._is_stuck:
                self._is_stuck = True
                log.warning("%s cannot be written: %s; the run continues, its lines wait", self._file, error)
            return
        if self._is_stuck:
            self._is_stuck = False
            log.info("%s is written again", self._file)
            self._log_loss()

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._is_torn else line
        num_written = 0
        try:
            while num_written < len(data):
                num_written += self._stream.write(data[num_written:])
        except OSError:
            if num_written:  # a torn line would be read as a whole one
                self._stream.truncate(os.fstat(self._stream.fileno()).st_size - num_written)
            raise
        self._is_torn = False

    def _log_loss(self) -> None:
        if self._num_lost:
            log.warning("%s: %d lines are lost", self._file, self._num_lost)
            self._num_lost = 0


def _ends_torn(descriptor: int) -> bool:
    """Returns whether the file's last line has no line break."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
