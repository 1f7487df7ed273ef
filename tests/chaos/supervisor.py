"""Runs one seed: real processes, faults by the seed's schedule, then the end of the run and the verdict."""

import functools
import heapq
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import redis

from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Commit, Keys
from tests.chaos import ranks, roles
from tests.chaos.completion import complete_run
from tests.chaos.disk import SmallDisk
from tests.chaos.faults import schedule
from tests.chaos.hits import Hits
from tests.chaos.leg import Leg
from tests.chaos.process_ends import reason_of, traceback_of, was_requested
from tests.chaos.processes import Process
from tests.chaos.proxy import Proxy
from tests.chaos.server import ChaosServer

TICK_S = 0.01


@dataclass
class InjectedFault:
    """A fault as it happened."""

    number: int
    at_s: float
    kind: str
    what: str


@dataclass
class Slot:
    """One process's place in the run. socket: its name at the proxy, the same for all processes in this place."""

    name: str
    socket: str
    process: Process | None = None
    start_at: float = 0.0
    was: str = ""


class Supervisor:
    """Supervises the run of one seed: starts missing processes, and injects the faults when they are due.

    It has a single thread, since it forks. `run` waits for nothing but the clock.
    """

    def __init__(
        self,
        leg: Leg,
        config: RunConfig,
        folder: Path,
        binary: Path,
        *,
        with_disk: bool,
        say: Callable[[str], None],
    ) -> None:
        self.leg = leg
        self.config = config
        self.folder = folder
        self.runs = folder / "runs"
        self.run_folder = config.folder(self.runs)
        self.run_folder.mkdir(parents=True)
        (folder / "logs").mkdir()
        save_run_file(config, self.run_folder)
        self.steps = folder / "steps"
        self.notes = Path(config.environment.kwargs["notes"])
        self.keys = Keys(config.name)
        self.problems: list[str] = []
        """Findings that fail the leg."""
        self.ends: Counter[str] = Counter()
        """How often a process ended by itself with a line that gives the reason, by that line without its numbers."""
        self.done: list[InjectedFault] = []
        self.corrupted: set[str] = set()
        self.disk = SmallDisk(self.run_folder / "checkpoints") if with_disk else None
        self.say = say
        # Not below `folder`: a socket's path may have at most 107 characters.
        self._sockets = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.server = ChaosServer(binary, appendfsync=leg.appendfsync)
        self.trainers = [Slot(name, name) for name in (("trainer", "standby") if leg.with_standby else ("trainer",))]
        self.producers = [Slot(f"producer-{n}", f"producer-{n}") for n in range(config.producers.count)]
        self.slots = [*self.trainers, *self.producers]
        self.proxy = Proxy(self._sockets, self.server.socket, [slot.socket for slot in self.slots])
        self.former: list[Process] = []
        """Trainers that were replaced and still run."""
        self.launchers: list[Process] = []
        """Every process that has started ranks."""
        self.hits = Hits(self, folder / "aims") if leg.with_ranks else None
        self.planned: list[tuple[float, int, Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._next_producer = config.producers.count
        self._num_started: Counter[str] = Counter()
        self.is_ending = False
        self._started = time.monotonic()
        self._was_full_at = dict.fromkeys(("disk full", "Redis full"), float("-inf"))
        self._redis_forgot_at = float("-inf")

    @property
    def succession(self) -> str:
        return "resumed" if len(self.trainers) == 1 else "the other takes over, this one back"

    def trainer(self, draw: Random) -> Slot:
        """Returns the trainer's slot; of two, the one with the lease if Redis answers."""
        if len(self.trainers) == 1:
            return self.trainers[0]
        try:
            owner: Any = (self.server.answers() and self.server.client.get(self.keys.lease)) or b""
        except redis.RedisError:
            owner = b""
        pids = _with_parent(int(owner.split(b"-")[-2])) if owner else ()
        holders = [slot for slot in self.trainers if slot.process and slot.process.pid in pids]
        return holders[0] if holders else draw.choice(self.trainers)

    def producer(self, draw: Random) -> Slot:
        return draw.choice(self.producers)

    def any_slot(self, draw: Random) -> Slot:
        return draw.choice(self.slots)

    def later(self, seconds: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self.planned, (time.monotonic() + seconds, next(self._numbers), action))

    def restart_later(self, slot: Slot, seconds: float) -> float:
        """Lets a new process take `slot` this long after the present one has ended."""
        slot.was = slot.name
        slot.start_at = time.monotonic() + seconds
        return seconds

    def rename(self, slot: Slot) -> None:
        slot.name = f"producer-{self._next_producer}"
        self._next_producer += 1

    def detach(self, slot: Slot) -> None:
        """Takes the process out of its slot and lets it live."""
        assert slot.process is not None
        self.former.append(slot.process)
        slot.process = None
        slot.start_at = 0.0

    def redis_later(self, seconds: float) -> float:
        self.later(seconds, lambda: None if self.server.is_running else self.server.start())
        self._redis_forgot_at = time.monotonic() + seconds
        return seconds

    def whole_checkpoints(self) -> list[Path]:
        """Returns the checkpoints that are committed and not corrupted, oldest first."""
        pointer = self._read_commit().get(Commit.CHECKPOINT, b"").decode()
        newest = int(pointer.partition("-")[0]) if pointer else -1
        found = [
            (int(folder.name.partition("-")[0]), folder.name != pointer, folder)
            for folder in (self.run_folder / "checkpoints").iterdir()
            if folder.is_dir() and folder.name[0].isdigit() and folder.name not in self.corrupted
        ]
        return [folder for version, _, folder in sorted(found) if version <= newest]

    def run(self) -> None:
        """Injects the faults, then waits until the run has ended."""
        for slot in self.slots:
            self.start(slot)
        due = time.monotonic() + 1.0
        for number, (gap_s, kind, draw) in enumerate(schedule(self.leg, with_disk=self.disk is not None)):
            due = max(due, time.monotonic() - gap_s) + gap_s
            while time.monotonic() < due:
                self._tick()
            deadline = time.monotonic() + self.leg.limit_s
            while (what := kind.inject(self, draw)) is None:
                self._tick()
                if time.monotonic() > deadline:
                    self.problem(f"fault {number} ({kind.name}) found nothing to act on for {self.leg.limit_s:.0f} s")
                    break
            if what is not None:
                self._note(number, kind.name, what)
            if kind.name in ("disk full", "Redis full"):
                self._was_full_at[kind.name] = time.monotonic() + 2.5
        complete_run(self)

    def _tick(self) -> None:
        now = time.monotonic()
        while self.planned and self.planned[0][0] <= now:
            heapq.heappop(self.planned)[2]()
        if self.server.is_running:
            self.server.watch()
        for slot in self.slots:
            if slot.process is not None and slot.process.poll() is not None:
                self._examine_end(slot.process)
                slot.process = None
                slot.start_at = max(slot.start_at, now + 0.05)
            if slot.process is None and now >= slot.start_at and not self.is_ending:
                self.start(slot)
        for process in [process for process in self.former if process.poll() is not None]:
            self.former.remove(process)
            self._examine_end(process, replaced=True)
        if self.hits is not None:
            self.hits.tick()
        time.sleep(TICK_S)

    def start(self, slot: Slot) -> None:
        environment = {"REDIS_URL": self.proxy.url(slot.socket), "OMP_NUM_THREADS": "1", "PENSTOCK_LOG": "text"}
        self._num_started[slot.name] += 1
        log = self.folder / "logs" / f"{slot.name}.{self._num_started[slot.name]}.log"
        config, runs = self.config, self.runs
        if slot in self.trainers:
            steps, broken = self.steps, self.leg.broken
            # One trainer must begin the run: a standby waits for a run that has begun.
            has_begun = any(self.run_folder.glob("checkpoints/epoch-*"))
            standby = len(self.trainers) > 1 and (slot is not self.trainers[0] or has_begun)
            resume = self._num_started[slot.name] > 1 and not standby
            train = functools.partial(roles.train, config, runs)
            if self.leg.with_ranks:
                train = functools.partial(ranks.train, config, self.folder / f"{slot.name}.toml", runs)
            slot.process = Process.fork(
                slot.name,
                log,
                environment,
                lambda: train(resume=resume, standby=standby, steps=steps, broken=broken),
            )
            if self.leg.with_ranks:
                self.launchers.append(slot.process)
        else:
            name = slot.name
            slot.process = Process.fork(slot.name, log, environment, lambda: roles.produce(config, runs, name))

    def _examine_end(self, process: Process, *, replaced: bool = False) -> None:
        """Checks how a process ended."""
        if (traceback := traceback_of(process)) is not None:
            self.problem(traceback)
        if self.hits is not None and self.hits.took(process):
            return
        if was_requested(process, run_is_ending=self.is_ending):
            return
        reason, complaint = reason_of(process, lambda reason: replaced or self._may_end(reason))
        self.ends[reason] += 1
        if complaint is not None:
            self.problem(complaint)

    def _may_end(self, reason: str) -> bool:
        """Returns whether a fault explains an end: a trainer ends with one line if another leads the run, or seems to
        in a Redis that has lost data, and if it cannot write its last checkpoint or policy."""
        now = time.monotonic()
        if "this trainer is of epoch" in reason or "is open already" in reason:
            return len(self.trainers) > 1 or now - self._redis_forgot_at < 30
        if "cannot be written: Redis" in reason:  # it was told to stop while it waited for room for a policy
            return now - self._was_full_at["Redis full"] < 30
        return "No space left" in reason and now - self._was_full_at["disk full"] < 30

    @staticmethod
    def have_ended(slots: list[Slot]) -> bool:
        return all(slot.process is None for slot in slots)

    def until(self, condition: Callable[[], bool], what: str) -> bool:
        deadline = time.monotonic() + self.leg.limit_s
        while not condition():
            if time.monotonic() > deadline:
                self.problem(f"not so after {self.leg.limit_s:.0f} s: {what}")
                return False
            self._tick()
        return True

    def close(self) -> None:
        """Ends all processes."""
        for process in [*(slot.process for slot in self.slots), *self.former, *self.launchers]:
            if process is not None:
                process.destroy()
        self.proxy.process.destroy()
        self.server.remove()
        if self.disk is not None:
            self.disk.remove()
        shutil.rmtree(self._sockets)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _note(self, number: int, kind: str, what: str) -> None:
        self.done.append(InjectedFault(number, round(self.elapsed_s, 2), kind, what))
        self.say(f"{self.leg.name}  {self.elapsed_s:7.2f} s  fault {number:3}  {kind}: {what}")

    def problem(self, text: str) -> None:
        if text in self.problems:
            return
        self.problems.append(text)
        self.say(f"{self.leg.name}  {self.elapsed_s:7.2f} s  PROBLEM: {text}")

    def have_left_others(self) -> bool:
        """Returns whether an ended trainer has left ranks."""
        return any(launcher.left_behind() for launcher in self.launchers)

    def newest_epoch(self) -> int:
        files = (self.run_folder / "checkpoints").glob("epoch-*")
        return max((int(file.name.partition("-")[2]) for file in files), default=-1)

    def num_steps(self) -> int:
        return self.steps.read_bytes().count(b"\n") if self.steps.exists() else 0

    def _read_commit(self) -> dict[bytes, bytes]:
        try:
            return self.server.client.hgetall(self.keys.commit) if self.server.answers() else {}  # type: ignore[return-value]
        except redis.RedisError:
            return {}


def _with_parent(pid: int) -> tuple[int, ...]:
    """Returns a process id, and that of its parent if it lives."""
    try:
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return (pid,)
