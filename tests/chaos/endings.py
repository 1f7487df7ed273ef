"""How processes may end."""

import re
from collections.abc import Callable

from tests.chaos.environment import MEANT_TO_FAIL
from tests.chaos.processes import Process


def is_as_asked(process: Process, *, run_is_ending: bool) -> bool:
    """Killed by the suite, or out with status 0 after it was told to stop or the run came to its end."""
    if process.status == 0:
        return process.was_told_to_stop or run_is_ending
    if process.status == -15:  # a trainer that has not begun has nothing to save, and no handler yet
        return process.was_told_to_stop and " policy " not in process.output()
    return process.status == -9 and process.was_killed


_TRACEBACK = re.compile(r"^( *)Traceback.*\n(?:\1 .*\n)*?(?:\1 +(.*)\n)(?:\1 .*\n)?\1(\S.*)", re.MULTILINE)
"""Indentation, a line of code near the end, the exception."""


def traceback_of(process: Process) -> str | None:
    """The first traceback in its log: the exception and where it came from. No fault may cause one; what the
    environment raises on purpose has one."""
    for _, place, error in _TRACEBACK.findall(process.output()):
        if not error.endswith(MEANT_TO_FAIL):
            return f"{process.log.name}: traceback: {error} ({place})"
    return None


def reason_of(process: Process, is_expected: Callable[[str], bool]) -> tuple[str, str | None]:
    """The last line of a process that ended by itself, without its numbers and paths; and the complaint,
    where that line is no error or none that a fault explains."""
    last = next((line for line in reversed(process.output().splitlines()) if line.strip()), "no output")
    reason = last.partition(" ERROR ")[2]
    complaint = None
    if not reason or not is_expected(reason):
        complaint = f"{process.log.name}: ended with status {process.status}: {last}"
    shown = re.sub(r"\S*/\S*", "PATH", re.sub(r"\b[0-9a-f]{8}\b|\d+", "N", reason or last))
    return re.sub(r"^(trainer|producer)( vN(:N)?)?", r"\1", shown)[:120], complaint
