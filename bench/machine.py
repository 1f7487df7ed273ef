"""The machine and its processes as Linux describes them. Standard library only."""

import os
from pathlib import Path


def first_value(file: str, key: str) -> str | None:
    """Returns the value of the first `key: value` line in a file of `/proc`; None if there is none."""
    try:
        lines = Path(file).read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def usable_cores() -> list[int]:
    """Returns the numbers of the cores that this process may run on; empty if the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def status_bytes(field: str) -> int:
    """Returns a size in `/proc/self/status`, such as `VmRSS` or the peak `VmHWM`."""
    value = first_value("/proc/self/status", f"{field}:")
    assert value is not None
    return int(value.removesuffix(" kB")) * 1024


def reset_peak() -> None:
    """Starts `VmHWM` again from the memory in use."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def children_of(pid: int) -> list[int]:
    """Returns the running processes that a process has started; none if the system does not say."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text("utf-8").split()]


def processor_s(pid: int) -> float:
    """Returns the processor seconds of a process and its running descendants; 0 if it has ended or the system does not
    say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        children = children_of(pid)
    except OSError:
        return 0.0
    ticks = int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(processor_s, children))


def children_cpu_s() -> float:
    """Returns the processor seconds of this process's running descendants."""
    return sum(map(processor_s, children_of(os.getpid())))
