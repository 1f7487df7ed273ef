"""Replaces the package `wandb` and its server, with the real treatment of steps: one below the run's is dropped, the
run's own adds to its row, a later one begins a new row. Points are kept by row, one entry per call of `log`."""

import os
import time
from typing import Any


class FakeServer:
    """The server's data of a run.

    step: the first step of a session that resumes the run, one after the last row.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.dropped: list[tuple[int, dict[str, float]]] = []
        self.asked: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return max((step for step, _ in self.rows), default=-1) + 1

    def init(self, **asked: Any) -> "FakeRun":
        self.asked = asked
        return FakeRun(self, self.step if asked["resume"] == "allow" else 0)


class FakeRun:
    def __init__(self, server: FakeServer, step: int) -> None:
        self._server = server
        self.step = step

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, numbers: dict[str, float], step: int) -> None:
        (self._server.dropped if step < self.step else self._server.rows).append((step, numbers))
        self.step = max(self.step, step)

    def finish(self) -> None:
        """Waits for an unreachable server while FAKE_WANDB_AWAY is set: nothing unblocks it."""
        while os.environ.get("FAKE_WANDB_AWAY"):
            time.sleep(0.1)


class Table:
    def __init__(self, **table: Any) -> None: ...


class Settings:
    def __init__(self, **settings: Any) -> None: ...


def init(**asked: Any) -> FakeRun:
    return FakeServer().init(**asked)
