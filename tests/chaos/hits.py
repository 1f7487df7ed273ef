"""Ranks of a sharded trainer that are hit: the aim, the trainer's end, and the training that follows."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import msgspec

from penstock.consumers.distributed.start import END_S
from penstock.consumers.distributed.watch import GRACE_S, TRAINER_ENDS
from tests.chaos.aim import Aim, Aims, Fate, Place, Strike
from tests.chaos.processes import Process
from tests.chaos.ranks import NUM_RANKS, RANK_TIMEOUT_S

if TYPE_CHECKING:
    from tests.chaos.supervisor import Supervisor

ENDED_WITHIN_S = RANK_TIMEOUT_S + GRACE_S + END_S + 8.0
"""The ranks' time-out, the time of a verdict, the launcher's wait for a frozen rank, and a margin."""
LOOK_S = 1.0
"""How often it is looked which trainer leads the run: that one is aimed at."""
AWAKE_AFTER_S = RANK_TIMEOUT_S + 6.0
"""After the other ranks have given up a frozen rank, before the launcher kills it."""


class Hit(msgspec.Struct, kw_only=True):
    """A rank that was hit. Times are seconds since then."""

    place: Place
    fate: Fate
    rank: int
    ended_s: float = -1.0
    """Until all ranks and their launcher had ended."""
    line: str = ""
    """The error in their log that ended them."""
    went_on_s: float = -1.0
    """Until a trainer of a newer epoch had taken a step."""


class Hits:
    """The hits of one leg, one at a time. folder: of the aims."""

    def __init__(self, supervisor: "Supervisor", folder: Path) -> None:
        self.done: list[Hit] = []
        self._supervisor = supervisor
        self._aims = Aims(folder)
        self._draw: Random | None = None
        """The random draws of the present fault."""
        self._rank, self._nth, self._wakes = 0, 0, False
        self._launcher: Process | None = None
        """The trainer that is aimed at."""
        self._look_at = 0.0
        self._strike: Strike | None = None
        self._hit: Hit | None = None
        self._epoch = 0
        self._num_steps: int | None = None
        """The steps taken when a newer epoch was first seen."""

    def hit(self, place: Place, fate: Fate, rank: int | None, draw: Random) -> str | None:
        """Aims at a rank, a random one if none is given. Must be called until it returns a description, once training
        has continued."""
        if draw is not self._draw:
            self._draw, self._strike, self._num_steps = draw, None, None
            self._rank, self._nth = draw.randrange(NUM_RANKS) if rank is None else rank, draw.randrange(1, 8)
            self._wakes = fate == "frozen" and draw.random() < 0.5
            self._launcher = self._hit = None
            self._look_at = 0.0
        hit = self._hit
        if hit is None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            leader = self._supervisor.trainer(draw).process
            if leader is not None and leader is not self._launcher:
                self._launcher = leader
                self._aims.take(Aim(launcher=leader.pid, rank=self._rank, place=place, fate=fate, nth=self._nth))
        if self._strike is None or hit is None or min(hit.ended_s, hit.went_on_s) < 0:
            return None
        self.done.append(hit)
        self._strike = self._hit = None
        woken = f", awake again after {AWAKE_AFTER_S:.0f} s" if self._wakes else ""
        return (
            f"rank {hit.rank} in {hit.place}{woken}: the trainer ended after {hit.ended_s:.1f} s "
            f"({brief(hit.line)}), training went on after {hit.went_on_s:.1f} s"
        )

    def tick(self) -> None:
        """Must be called often."""
        if self._strike is None and (strike := self._aims.strike()) is not None:
            self._strike = strike
            self._hit = Hit(place=strike.aim.place, fate=strike.aim.fate, rank=strike.aim.rank)
            self._epoch = self._supervisor.newest_epoch()
            if self._wakes:
                self._supervisor.later(strike.at + AWAKE_AFTER_S - time.monotonic(), _waking(strike.pid))
        if self._strike is None or self._hit is None or self._hit.went_on_s >= 0:
            return
        if self._num_steps is None and self._supervisor.newest_epoch() > self._epoch:
            self._num_steps = self._supervisor.num_steps()
        elif self._num_steps is not None and self._supervisor.num_steps() > self._num_steps:
            self._hit.went_on_s = round(time.monotonic() - self._strike.at, 1)

    def took(self, process: Process) -> bool:
        """Returns whether this process, which has ended, had started a rank that was hit, and checks how it ended."""
        self.tick()
        strike, hit = self._strike, self._hit
        if strike is None or hit is None or strike.aim.launcher != process.pid:
            return False
        hit.ended_s = round(time.monotonic() - strike.at, 1)
        endings = endings_in(process.output())
        hit.line = endings[0] if endings else ""
        if (wrong := complaint(strike.aim, process.status, endings, hit.ended_s)) is not None:
            self._supervisor.problem(f"{process.log.name}: rank {hit.rank} {hit.fate} in {hit.place}: {wrong}")
        return True


def complaint(aim: Aim, status: int | None, endings: list[str], ended_s: float) -> str | None:
    """Returns what is wrong with the end of a trainer with a rank that was hit, or None: the status, the time, or the
    line that must name the rank, its phase and the cause."""
    beside = r"(, (checkpoint|publish))+ beside"
    doing = rf"(?=.*checkpoint).+?({beside})?" if aim.place == "checkpoint" else f"{aim.place}({beside})?"
    expected = rf"rank {aim.rank} \({doing}\) has died or is frozen: not heard of for \d+ s"
    if status != 1 or len(endings) != 1 or not re.match(expected, endings[0]):
        return f"status {status} and {endings}, expected 1 and one line: {expected}"
    if ended_s > ENDED_WITHIN_S:
        return f"the trainer ended after {ended_s:.1f} s, expected {ENDED_WITHIN_S:.0f} s at most"
    return None


def endings_in(output: str) -> list[str]:
    """Returns the errors in a log that end a trainer; after others it continues."""
    return re.findall(rf" ERROR (?:trainer )?(?:v\S+ )?(.*); {TRAINER_ENDS}", output)


def brief(line: str) -> str:
    """Returns the line without the network library's part."""
    return line.partition(" ([")[0]


def _waking(pid: int) -> Callable[[], None]:
    def wake() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return wake
