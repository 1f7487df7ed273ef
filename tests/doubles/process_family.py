"""Processes found by what they inherited, so that orphans are found too."""

from collections.abc import Iterable

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


def command_lines(processes: Iterable[psutil.Process]) -> list[list[str]]:
    """Those of the processes that are still there."""
    found = []
    for process in processes:
        try:
            found.append(process.cmdline())
        except psutil.Error:
            continue  # gone, or a zombie
    return found
