"""The history of an environment's tasks: the only input of a curriculum, and part of every checkpoint."""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_NEW = {
    **dict.fromkeys(("released", "settled", "flat", "last_pass"), np.int32(0)),
    "solve_rate": np.float32(np.nan),
}
"""The columns, of 4 bytes each, and their values for a new task."""


class TaskHistory:
    """Columns by task: task 1 is at index 0. The columns are empty if `num_tasks` is 0.

    released, settled: [num_tasks] int32, how often. A dead group counts as settled.
    flat: [num_tasks] int32, consecutive latest groups without reward variance; with a teacher no group counts.
    last_pass: [num_tasks] int32, the pass of the latest release, from 1; 0 before the first. The next pass begins when
        a task is released that was already released in this one.
    solve_rate: [num_tasks] float32, mean reward of its groups, clamped to 0 to 1: the newest group weighs as much as
        all earlier ones together. NaN before the first.
    """

    released: np.ndarray
    settled: np.ndarray
    flat: np.ndarray
    last_pass: np.ndarray
    solve_rate: np.ndarray

    def __init__(self, num_tasks: int = 0) -> None:
        self.num_released = 0
        """Releases of all tasks."""
        self._pass = 0
        for name, new in _NEW.items():
            setattr(self, name, np.full(num_tasks, new))

    @property
    def num_tasks(self) -> int:
        return len(self.released)

    @property
    def num_open(self) -> np.ndarray:
        """[num_tasks] int32, releases that are not settled."""
        return self.released - self.settled

    def resize(self, num_tasks: int) -> None:
        """Adds new tasks at the end of a data set, or drops those that are gone."""
        for name, new in _NEW.items():
            kept = getattr(self, name)[:num_tasks]
            setattr(self, name, np.concatenate([kept, np.full(num_tasks - len(kept), new)]))
        self._pass = int(self.last_pass.max(initial=0))

    def release(self, number: int) -> None:
        self.num_released += 1
        if number <= self.num_tasks:
            self.released[number - 1] += 1
            self._pass = self.last_pass[number - 1] = max(self._pass, self.last_pass[number - 1] + 1)

    def settle(self, number: int, rewards: Sequence[float], *, flat: bool) -> None:
        """Notes the rewards of a group, which are empty if it died. flat: they do not vary."""
        if number > self.num_tasks:
            return
        at = number - 1
        # A release under `uniform`, or while there were fewer tasks, was not counted.
        self.settled[at] = min(self.settled[at] + 1, self.released[at])
        if not rewards:
            return
        rate = min(1.0, max(0.0, sum(rewards) / len(rewards)))
        self.solve_rate[at] = rate if np.isnan(self.solve_rate[at]) else (self.solve_rate[at] + rate) / 2
        self.flat[at] = self.flat[at] + 1 if flat else 0

    def reopen(self, number: int) -> None:
        """Notes that a dead group's task is open again."""
        if number <= self.num_tasks:
            self.settled[number - 1] = max(self.settled[number - 1] - 1, 0)

    def to_state(self) -> dict[str, Any]:
        columns = b"".join(getattr(self, name).tobytes() for name in _NEW)
        return {
            "num_released": self.num_released,
            "num_tasks": self.num_tasks,
            "columns": base64.b64encode(zlib.compress(columns, 1)).decode(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "TaskHistory":
        history = cls()
        history.num_released = state["num_released"]
        columns, size = zlib.decompress(base64.b64decode(state["columns"])), state["num_tasks"]
        for n, (name, new) in enumerate(_NEW.items()):
            setattr(history, name, np.frombuffer(columns, new.dtype, size, 4 * n * size).copy())
        history._pass = int(history.last_pass.max(initial=0))
        return history
