"""The points that sinks are fed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.schemas.process.files import write_whole

_LEFT_OUT = frozenset(("update", "time_s", "started_s", "uptime_s", "clock_ahead_s", "rollouts"))
"""The two axes, corrections of one of them, and counts that would make hundreds of curves."""


class ShownCompletion(NamedTuple):
    """A completion that a batch was trained on. prompt, completion: as the tokenizer decodes them, special tokens
    included; in a completion of several turns with what came between."""

    update: int
    environment: str
    prompt: str
    completion: str
    reward: float


COLUMNS = ShownCompletion._fields


class SinkPoint(NamedTuple):
    """One line of updates.jsonl (kind "updates") or evaluations.jsonl (kind "evaluations").

    numbers: by name; those of a table as `table/name`. completions: of an update, some or none.
    """

    kind: str
    update: int
    time_s: float
    numbers: dict[str, float]
    completions: tuple[ShownCompletion, ...] = ()


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


class KeptRun:
    """A JSON file in a run's folder: the run of a sink that all its trainers continue, and its last update.

    id: empty before `keep`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            found = json.loads(file.read_text("utf-8"))
            self.id, self._last_update = str(found["id"]), int(found.get("last_update", 0))
        except (FileNotFoundError, ValueError, KeyError):
            self.id, self._last_update = "", 0

    def keep(self, id: str) -> None:
        self.id = id
        self._write()

    def takes(self, update: int) -> bool:
        """Returns whether the update is new to the sink, and notes it."""
        if update <= self._last_update:
            return False
        self._last_update = update
        self._write()
        return True

    def _write(self) -> None:
        write_whole(self._file, json.dumps({"id": self.id, "last_update": self._last_update}))
