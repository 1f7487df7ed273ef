"""The points that sinks are fed."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

_LEFT_OUT = frozenset(("update", "time_s", "started_s", "uptime_s", "clock_ahead_s", "rollouts"))
"""The two axes, corrections of one of them, and counts that would make hundreds of curves."""


class SinkPoint(NamedTuple):
    """One line of updates.jsonl (kind "updates") or evaluations.jsonl (kind "evaluations").

    numbers: by name; those of a table as `table/name`.
    """

    kind: str
    update: int
    time_s: float
    numbers: dict[str, float]


class Sink(Protocol):
    """A destination of points, used by one thread. Every method may block and may raise anything."""

    def write(self, point: SinkPoint) -> None: ...

    def close(self) -> None: ...


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns the numbers of a line by name, without those of `_LEFT_OUT`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if prefix + name in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            found[prefix + name] = float(value)
    return found
