"""A caller's own functions, called in its process with the numbers of a run as they come."""

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.deploy.launch.progress import Tail
from penstock.deploy.report.lines import EvaluationPoint, Update, row_of
from penstock.schemas.config import ConfigError

Callback = Callable[[dict[str, Any]], object]
STOP = "stop"


def check_callbacks(**callbacks: Callback | None) -> None:
    """Raises ConfigError for what cannot be called with a row and awaits nothing."""
    for name, given in callbacks.items():
        if given is not None and (not callable(given) or inspect.iscoroutinefunction(given)):
            raise ConfigError(f"{name} = {given!r}: expected a function (row: dict), not a coroutine")


class Callbacks:
    """Calls `on_update` and `on_evaluation` with each line that is appended to the run's folder from now on.

    stop: set once one of them returns "stop" or raises; none is called from then on. error: what it raised.
    """

    def __init__(
        self, folder: Path, on_update: Callback | None, on_evaluation: Callback | None, stop: threading.Event
    ) -> None:
        self.error: BaseException | None = None
        self._stop = stop
        self._last_update = -1
        files = (("updates.jsonl", Update, on_update), ("evaluations.jsonl", EvaluationPoint, on_evaluation))
        self._sources = [(_new_lines(folder / name, kind), call) for name, kind, call in files if call is not None]

    def look(self) -> None:
        """Calls with the lines that have come since. Raises nothing."""
        for tail, call in self._sources:
            for line in tail.read():
                if self._stop.is_set():
                    return
                if isinstance(line, Update):
                    if line.skipped_reason is not None and line.update <= self._last_update:
                        continue  # a batch that made no update repeats a number
                    self._last_update = line.update
                try:
                    answer = call(row_of(line))
                except BaseException as error:  # the run is stopped in order before it is raised
                    self.error = error
                    self._stop.set()
                    return
                if isinstance(answer, str) and answer == STOP:
                    self._stop.set()


def _new_lines(file: Path, kind: type) -> Tail:
    tail = Tail(file, kind)
    tail.read()
    return tail
