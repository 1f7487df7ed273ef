"""Decides how processes may end."""

import re
from collections.abc import Callable

from tests.chaos.environment import MEANT_TO_FAIL
from tests.chaos.processes import Process


def was_requested(process: Process, *, run_is_ending: bool) -> bool:
    """Returns whether a process was killed by the suite, or ended with status 0 after it was told to stop or the run
    finished."""
    if process.status == 0:
        return process.was_told_to_stop or run_is_ending
    if process.status == -15:  # a trainer that has not begun has neither anything to save nor a handler
        return process.was_told_to_stop and " policy " not in process.output()
    return process.status == -9 and process.was_killed


_TRACEBACK = re.compile(r"^( *)Traceback.*\n(?:\1 .*\n)*?(?:\1 +(.*)\n)(?:\1 .*\n)?\1(\S.*)", re.MULTILINE)
"""Indentation, a line of code near the end, the exception."""


def traceback_of(process: Process) -> str | None:
    """Returns the first traceback in a process's log, the exception and its place, or None. No fault may cause one;
    tracebacks of what the environment raises on purpose do not count."""
    for _, place, error in _TRACEBACK.findall(process.output()):
        if not error.endswith(MEANT_TO_FAIL):
            return f"{process.log.name}: traceback: {error} ({place})"
    return None


def reason_of(process: Process, is_expected: Callable[[str], bool]) -> tuple[str, str | None]:
    """Returns the last line of a process that ended by itself, without numbers and paths, and a complaint if that line
    is no error or none that a fault explains."""
    last = next((line for line in reversed(process.output().splitlines()) if line.strip()), "no output")
    reason = last.partition(" ERROR ")[2]
    complaint = None
    if not reason or not is_expected(reason):
        complaint = f"{process.log.name}: ended with status {process.status}: {last}"
    shown = re.sub(r"\S*/\S*", "PATH", re.sub(r"\b[0-9a-f]{8}\b|\d+", "N", reason or last))
    return re.sub(r"^(trainer|producer)( vN(:N)?)?", r"\1", shown)[:120], complaint
