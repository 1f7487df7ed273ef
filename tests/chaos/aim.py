"""Faults that hit one rank of a sharded trainer at a place of its work, such as its forward pass.

The suite leaves an `Aim` in a folder. The rank that is meant takes it at the place that is meant, waits until the
others know from its heartbeats what it is doing, leaves a `Strike`, and kills or freezes itself. The places are in code
that a run file names by import path (objective, optimizer), and in the learner that the suite observes.
"""

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from penstock.consumers.distributed.watch import BEAT_S
from penstock.consumers.learning.interfaces import LossInputs, LossOutputs
from penstock.consumers.learning.objectives.grpo import Grpo

Place = Literal["forward", "backward", "optimizer", "checkpoint", "between steps"]
Fate = Literal["killed", "frozen"]
NUM_BEATS = 3
"""Heartbeats for which the rank waits at the place, so that the others know it."""


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """A rank to hit. launcher: the process that started it: a trainer that was replaced, and wakes up, is not meant.
    nth: how often it passes the place before it is hit."""

    launcher: int
    rank: int
    place: Place
    fate: Fate
    nth: int


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was hit. at: by the monotonic clock."""

    aim: Aim
    pid: int
    at: float


class Aims:
    """The suite's side of the folder. It holds one aim at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def take(self, aim: Aim) -> None:
        """Aims, in place of an earlier aim whose trainer has ended before it was hit."""
        _write(self._folder / "aim", aim)

    def strike(self) -> Strike | None:
        """Returns the strike of the last aim, if it has hit; only once."""
        file = self._folder / "strike"
        if not file.exists():
            return None
        strike = msgspec.json.decode(file.read_bytes(), type=Strike)
        file.unlink()
        return strike


class Target:
    """A rank's side of the folder: the rank checks at each place whether it is meant. timeout_s: the ranks' own."""

    def __init__(self, folder: str | Path, timeout_s: float) -> None:
        self._folder = Path(folder)
        self._wait_s = NUM_BEATS * min(BEAT_S, timeout_s / 10)
        self._passed: Counter[Aim] = Counter()

    def at(self, place: Place) -> None:
        if not dist.is_initialized() or not (self._folder / "aim").exists():
            return
        aim = msgspec.json.decode((self._folder / "aim").read_bytes(), type=Aim)
        if (aim.launcher, aim.rank, aim.place) != (os.getppid(), dist.get_rank(), place):
            return
        self._passed[aim] += 1
        if self._passed[aim] <= aim.nth:
            return
        time.sleep(self._wait_s)
        (self._folder / "aim").unlink()
        strike = Strike(aim=aim, pid=os.getpid(), at=time.monotonic())
        _write(self._folder / "strike", strike)
        os.kill(os.getpid(), signal.SIGKILL if aim.fate == "killed" else signal.SIGSTOP)


def _write(file: Path, what: msgspec.Struct) -> None:
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(what))
    partial.rename(file)


class AimedGrpo:
    """GRPO that is hit in the forward pass before the loss, or at the beginning of the backward pass."""

    def __init__(self, *, folder: str, timeout_s: float) -> None:
        self._grpo = Grpo()
        self._target = Target(folder, timeout_s)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self._target.at("forward")
        if inputs.current_logprobs.requires_grad:
            inputs.current_logprobs.register_hook(lambda gradient: self._target.at("backward"))
        return self._grpo(inputs)


class AimedAdamW(torch.optim.AdamW):
    """AdamW that is hit at the beginning of a step."""

    def __init__(self, parameters: Any, *, folder: str, timeout_s: float, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._target = Target(folder, timeout_s)

    def step(self, closure: Any = None) -> Any:
        self._target.at("optimizer")
        return super().step(closure)
