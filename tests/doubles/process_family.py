"""Processes found by what they inherited, so that orphans are found too."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK = "PENSTOCK_TEST_FAMILY"
"""A variable in the environment of the first of them."""


def family(mark: str) -> list[psutil.Process]:
    """Every process, orphaned or not, that carries `mark` in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # gone, or another user's
    return found


def holders_of_files(folder: Path) -> set[int]:
    """The processes that have a file in the folder open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for descriptor in list((process / "fd").iterdir()):
                with contextlib.suppress(OSError):  # closed meanwhile
                    if os.readlink(descriptor).startswith(str(folder)):
                        found.add(int(process.name))
    return found


def command_lines(processes: Iterable[psutil.Process]) -> list[list[str]]:
    """Those of the processes that are still there."""
    found = []
    for process in processes:
        try:
            found.append(process.cmdline())
        except psutil.Error:
            continue  # gone, or a zombie
    return found
