"""How processes may end."""

import re
from collections.abc import Callable

from tests.chaos.processes import Process


def is_as_asked(process: Process, *, run_is_ending: bool) -> bool:
    """Killed by the suite, or out with status 0 after it was told to stop or the run came to its end."""
    if process.status == 0:
        return process.was_told_to_stop or run_is_ending
    if process.status == -15:  # a trainer that has not begun has nothing to save, and no handler yet
        return process.was_told_to_stop and " policy " not in process.output()
    return process.status == -9 and process.was_killed


def traceback_of(process: Process) -> str | None:
    """The first traceback in its log: the last line and where it came from. No fault may cause one."""
    output = process.output()
    if "Traceback" not in output:
        return None
    lines = output[output.index("Traceback") :].splitlines()
    end = next((n for n, line in enumerate(lines[1:], 1) if line and not line.startswith((" ", "\t"))), len(lines) - 1)
    return f"{process.log.name}: traceback: {lines[end]} ({lines[max(0, end - 2)].strip()})"


def reason_of(process: Process, is_expected: Callable[[str], bool]) -> tuple[str, str | None]:
    """The last line of a process that ended by itself, without its numbers and paths; and the complaint,
    where that line is no error or none that a fault explains."""
    last = next((line for line in reversed(process.output().splitlines()) if line.strip()), "no output")
    reason = last.partition(" ERROR ")[2]
    complaint = None
    if not reason or not is_expected(reason):
        complaint = f"{process.log.name}: ended with status {process.status}: {last}"
    return re.sub(r"\S*/\S*", "PATH", re.sub(r"\b[0-9a-f]{8}\b|\d+", "N", reason or last))[:120], complaint
