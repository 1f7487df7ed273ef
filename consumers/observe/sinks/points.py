"""The points that a sink is fed with."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

_ON_THE_AXES = frozenset(("update", "time_s"))


class SinkPoint(NamedTuple):
    """One line of updates.jsonl (kind "updates") or evaluations.jsonl (kind "evaluations").

    numbers: by their names in the line, those of a table as `table/name`.
    """

    kind: str
    update: int
    time_s: float
    numbers: dict[str, float]


class Sink(Protocol):
    """Used by one thread. Every method may block and may raise anything."""

    def write(self, point: SinkPoint) -> None: ...

    def close(self) -> None: ...


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line by name, without the two axes."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{prefix}{name}/")
        elif type(value) in (int, float) and prefix + name not in _ON_THE_AXES:
            found[prefix + name] = float(value)
    return found
