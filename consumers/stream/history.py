"""What became of the tasks of an environment: all that a curriculum decides by, and part of every checkpoint."""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_NEW = {
    **dict.fromkeys(("released", "settled", "flat", "last_pass"), np.int32(0)),
    "solve_rate": np.float32(np.nan),
}
"""The columns, of 4 bytes each, and what they hold of a new task."""


class TaskHistory:
    """By task, from number 1 at place 0; nothing by task where `num_tasks` is 0.

    released, settled: [num_tasks] int32, how often. A group that died counts as settled.
    flat: [num_tasks] int32, its last groups without reward variance, in a row; under a teacher no group counts.
    last_pass: [num_tasks] int32, the pass in which it was released last, from 1; 0 before. The next pass begins when a
        task is released that was released in this one.
    solve_rate: [num_tasks] float32, mean rewards, within 0 and 1, of its groups: the newest counts as much as all
        before it. NaN before the first.
    """

    released: np.ndarray
    settled: np.ndarray
    flat: np.ndarray
    last_pass: np.ndarray
    solve_rate: np.ndarray

    def __init__(self, num_tasks: int = 0) -> None:
        self.num_released = 0
        """Tasks released, each as often as it was."""
        self._pass = 0
        for name, new in _NEW.items():
            setattr(self, name, np.full(num_tasks, new))

    @property
    def num_tasks(self) -> int:
        return len(self.released)

    @property
    def num_open(self) -> np.ndarray:
        """[num_tasks] int32, times released and not settled."""
        return self.released - self.settled

    def resize(self, num_tasks: int) -> None:
        """Takes tasks in that were added at the end of a data set, or leaves those out that are gone."""
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
        """Notes the rewards of a group, none if it died. flat: they do not vary."""
        if number > self.num_tasks:
            return
        at = number - 1
        # One released under `uniform`, or while there were fewer tasks, was not counted.
        self.settled[at] = min(self.settled[at] + 1, self.released[at])
        if not rewards:
            return
        rate = min(1.0, max(0.0, sum(rewards) / len(rewards)))
        self.solve_rate[at] = rate if np.isnan(self.solve_rate[at]) else (self.solve_rate[at] + rate) / 2
        self.flat[at] = self.flat[at] + 1 if flat else 0

    def reopen(self, number: int) -> None:
        """Notes that a dead group's task is to be settled again."""
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
