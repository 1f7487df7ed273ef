"""Finds processes by what they inherited, so that orphans are found too."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "PENSTOCK_TEST_FAMILY"
"""The environment variable that marks the first process, and with it all that it starts."""


def family(mark: str) -> list[psutil.Process]:
    """Returns every process, orphaned or not, that has `mark` in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or belongs to another user
    return found


def holders_of_files(folder: Path) -> set[int]:
    """Returns the ids of the processes that have a file in the folder open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            for descriptor in list((process / "fd").iterdir()):
                with contextlib.suppress(OSError):  # it was closed
                    if os.readlink(descriptor).startswith(str(folder)):
                        found.add(int(process.name))
    return found


def command_lines(processes: Iterable[psutil.Process]) -> list[list[str]]:
    """Returns the command lines of the processes that still exist."""
    found = []
    for process in processes:
        try:
            found.append(process.cmdline())
        except psutil.Error:
            continue  # it has ended, or is a zombie
    return found
