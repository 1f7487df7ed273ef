"""Ends the programs that rewards and environments have started, with the producer."""

import contextlib
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from penstock.producers.rollout.scoring import THREAD_NAME

_STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system"}
_NUM_SCANS = 2
_PAUSE_S = 0.05
"""Between two scans: a thread may have been about to start a program."""


def end_programs() -> None:
    """Kills every process that descends from this one, and lets no reward's thread start another. A program that has
    detached itself (its parent has ended) is not found."""
    sys.addaudithook(_refuse_start)
    for n in range(_NUM_SCANS):
        if n:
            time.sleep(_PAUSE_S)
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _refuse_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and threading.current_thread().name == THREAD_NAME:
        raise RuntimeError("the producer ends, and starts no program any more")


def _descendants() -> list[int]:
    """Returns the process ids of all descendants but multiprocessing's tracker, which ends itself and cleans up."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            parent = int(status.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    found = [pid for pid in children.get(os.getpid(), []) if pid != tracker]
    for pid in found:
        found += children.get(pid, [])
    return found
