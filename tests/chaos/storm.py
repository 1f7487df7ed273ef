"""One seed: a run of real processes, faults on it by the seed's schedule, then calm, and the judgement."""

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

import msgspec
import redis

from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.config import RunConfig
from penstock.schemas.keys import Commit, Keys
from tests.chaos import ranks, roles
from tests.chaos.calm import ENGINE_BOOT_S, end
from tests.chaos.disk import SmallDisk
from tests.chaos.endings import is_as_asked, reason_of, traceback_of
from tests.chaos.faults import schedule
from tests.chaos.hits import Hits
from tests.chaos.leg import Leg
from tests.chaos.processes import Process
from tests.chaos.proxy import Proxy
from tests.chaos.server import ChaosServer

TICK_S = 0.01


@dataclass
class Done:
    """A fault as it happened."""

    number: int
    at_s: float
    kind: str
    what: str


@dataclass
class Seat:
    """One process's place in the run. socket: its name at the proxy, which outlives its occupants."""

    name: str
    socket: str
    process: Process | None = None
    start_at: float = 0.0
    was: str = ""
    number: int | None = None
    """Of its process among all producers; see `roles.SAMPLED`."""


class Storm:
    """Supervises the run of one seed: starts what is missing, does the faults when they are due.

    Single-threaded, since it forks. `run` waits for nothing but the clock.
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
        self.labels = folder / "labels"
        self.notes = Path(config.environment.kwargs["notes"])
        self.keys = Keys(config.name)
        self.problems: list[str] = []
        """Findings that fail the leg."""
        self.ends: Counter[str] = Counter()
        """How often a process ended by itself with a line that says why, by that line without its numbers."""
        self.done: list[Done] = []
        self.spoiled: set[str] = set()
        self.struck: set[Path] = set()
        """Left by producers that were killed while they changed a host's copy."""
        self.host_folder = Path(config.weights.host_folder or "")
        self.disk = SmallDisk(self.run_folder / "checkpoints") if with_disk else None
        self.say = say
        # Not below `folder`: a socket's path may have at most 107 characters.
        self._sockets = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.server = ChaosServer(binary, self._sockets, appendfsync=leg.appendfsync)
        self.trainers = [Seat(name, name) for name in (("trainer", "standby") if leg.with_standby else ("trainer",))]
        self.producers = [Seat(f"producer-{n}", f"producer-{n}") for n in range(config.producers.count)]
        self.seats = [*self.trainers, *self.producers]
        self.proxy = Proxy(self._sockets, self.server.socket, [seat.socket for seat in self.seats])
        self.former: list[Process] = []
        """Trainers that were replaced and live on."""
        self.engines: list[Process] = []
        """Every process that had the real engine."""
        self.launchers: list[Process] = []
        """Every process that has started ranks."""
        self.hits = Hits(self, folder / "aims") if leg.with_ranks else None
        self.planned: list[tuple[float, int, Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._producer_numbers = itertools.count()
        self.ended: dict[int, str] = {}
        """Producers that a fault has ended in a leg of long rollouts, by number: how."""
        self._next_producer = config.producers.count
        self._num_started: Counter[str] = Counter()
        self.is_calm = False
        self._started = time.monotonic()
        self._disk_was_full_at = float("-inf")
        self._redis_forgot_at = float("-inf")

    @property
    def sampled(self) -> Path:
        return self.folder / roles.SAMPLED

    @property
    def succession(self) -> str:
        return "resumed" if len(self.trainers) == 1 else "the other takes over, this one back"

    def trainer(self, draw: Random) -> Seat:
        """The trainer, or of two the one that has the lease, as far as Redis can be asked."""
        if len(self.trainers) == 1:
            return self.trainers[0]
        try:
            owner: Any = self.server.client.get(self.keys.lease) or b""
        except redis.RedisError:
            owner = b""
        pids = _with_parent(int(owner.split(b"-")[-2])) if owner else ()
        holders = [seat for seat in self.trainers if seat.process and seat.process.pid in pids]
        return holders[0] if holders else draw.choice(self.trainers)

    def producer(self, draw: Random) -> Seat:
        return draw.choice(self.producers)

    def any_seat(self, draw: Random) -> Seat:
        return draw.choice(self.seats)

    def later(self, seconds: float, action: Callable[[], Any]) -> None:
        heapq.heappush(self.planned, (time.monotonic() + seconds, next(self._numbers), action))

    def restart_later(self, seat: Seat, seconds: float) -> float:
        """Lets `seat` be taken again so long after its process has ended."""
        seat.was = seat.name
        seat.start_at = time.monotonic() + seconds
        return seconds

    def rename(self, seat: Seat) -> None:
        seat.name = f"producer-{self._next_producer}"
        self._next_producer += 1

    def give_up(self, seat: Seat) -> None:
        """Takes the process out of its seat and lets it live."""
        assert seat.process is not None
        self.former.append(seat.process)
        seat.process = None
        seat.start_at = 0.0

    def redis_later(self, seconds: float) -> float:
        self.later(seconds, lambda: None if self.server.is_running else self.server.start())
        self._redis_forgot_at = time.monotonic() + seconds
        return seconds

    def whole_checkpoints(self) -> list[Path]:
        """Committed and not spoiled, oldest first."""
        pointer = self._read_commit().get(Commit.CHECKPOINT, b"").decode()
        newest = int(pointer.partition("-")[0]) if pointer else -1
        found = [
            (int(folder.name.partition("-")[0]), folder.name != pointer, folder)
            for folder in (self.run_folder / "checkpoints").iterdir()
            if folder.is_dir() and folder.name[0].isdigit() and folder.name not in self.spoiled
        ]
        return [folder for version, _, folder in sorted(found) if version <= newest]

    def run(self) -> None:
        """The storm, then calm until the run has ended."""
        self.server.start()
        for seat in self.seats:
            self.start(seat)
        if self.leg.with_vllm:
            self.until(self.engine_serves, "the real engine serves", ENGINE_BOOT_S)
        due = time.monotonic() + 1.0
        for number, (gap_s, kind, draw) in enumerate(schedule(self.leg, with_disk=self.disk is not None)):
            due = max(due, time.monotonic() - gap_s) + gap_s
            while time.monotonic() < due:
                self._tick()
            deadline = time.monotonic() + self.leg.limit_s
            while (what := kind.harm(self, draw)) is None:
                self._tick()
                if time.monotonic() > deadline:
                    self.problem(f"fault {number} ({kind.name}) found nothing to act on for {self.leg.limit_s:.0f} s")
                    break
            if what is not None:
                self._note(number, kind.name, what)
            if kind.name == "disk full":
                self._disk_was_full_at = time.monotonic() + 2.5
        end(self)

    def _tick(self) -> None:
        now = time.monotonic()
        while self.planned and self.planned[0][0] <= now:
            heapq.heappop(self.planned)[2]()
        if self.server.is_running:
            self.server.watch()
        for seat in self.seats:
            if seat.process is not None and seat.process.poll() is not None:
                self._bury(seat.process)
                seat.process = None
                seat.start_at = max(seat.start_at, now + 0.05)
            if seat.process is None and now >= seat.start_at and not self.is_calm:
                self.start(seat)
        for process in [process for process in self.former if process.poll() is not None]:
            self.former.remove(process)
            self._bury(process, replaced=True)
        if self.hits is not None:
            self.hits.tick()
        time.sleep(TICK_S)

    def start(self, seat: Seat) -> None:
        environment = {"REDIS_URL": self.proxy.url(seat.socket), "OMP_NUM_THREADS": "1", "PENSTOCK_LOG": "text"}
        self._num_started[seat.name] += 1
        log = self.folder / "logs" / f"{seat.name}.{self._num_started[seat.name]}.log"
        config, runs = self.config, self.runs
        if seat in self.trainers:
            steps, broken = self.steps, self.leg.broken
            # Somebody must begin the run; nobody stands by for one that has not begun.
            has_begun = any(self.run_folder.glob("checkpoints/epoch-*"))
            standby = len(self.trainers) > 1 and (seat is not self.trainers[0] or has_begun)
            resume = self._num_started[seat.name] > 1 and not standby
            train = functools.partial(roles.train, config, runs)
            if self.leg.with_ranks:
                train = functools.partial(ranks.train, config, self.folder / f"{seat.name}.toml", runs)
            seat.process = Process.fork(
                seat.name,
                log,
                environment,
                lambda: train(resume=resume, standby=standby, steps=steps, broken=broken),
            )
            if self.leg.with_ranks:
                self.launchers.append(seat.process)
        elif self.leg.with_vllm and seat is self.producers[0]:
            file = self.folder / "config.json"
            file.write_bytes(msgspec.json.encode(config))
            seat.process = Process.spawn(seat.name, log, environment, roles.engine_command(file, runs, seat.name))
            self.engines.append(seat.process)
        else:
            name, token_s, broken = seat.name, 0.1 if self.leg.with_vllm else 0.005, self.leg.broken
            number = next(self._producer_numbers) if self.leg.with_long else None
            seat.process = Process.fork(
                seat.name, log, environment, lambda: roles.produce(config, runs, name, token_s, number, broken)
            )
            seat.number = number

    def _bury(self, process: Process, *, replaced: bool = False) -> None:
        """Looks at how a process ended."""
        if (traceback := traceback_of(process)) is not None:
            self.problem(traceback)
        if self.hits is not None and self.hits.took(process):
            return
        process.was_killed |= (self.folder / f"{roles.KILL_IN_PATCH}.{process.pid}").exists()
        if is_as_asked(process, run_is_ending=self.is_calm):
            return
        reason, complaint = reason_of(process, lambda reason: replaced or self._may_end(reason))
        self.ends[reason] += 1
        if complaint is not None:
            self.problem(complaint)

    def _may_end(self, reason: str) -> bool:
        """A trainer ends with one line when another has the run, or seems to have it in a Redis that has forgotten, and
        when it cannot write its last checkpoint."""
        now = time.monotonic()
        if "this trainer is of epoch" in reason or "is open already" in reason:
            return len(self.trainers) > 1 or now - self._redis_forgot_at < 30
        return "No space left" in reason and now - self._disk_was_full_at < 30

    @staticmethod
    def have_ended(seats: list[Seat]) -> bool:
        return all(seat.process is None for seat in seats)

    def until(self, condition: Callable[[], bool], what: str, limit_s: float | None = None) -> bool:
        limit_s = limit_s or self.leg.limit_s
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                self.problem(f"not so after {limit_s:.0f} s: {what}")
                return False
            self._tick()
        return True

    def close(self) -> None:
        """Leaves nothing running."""
        for process in [*(seat.process for seat in self.seats), *self.former, *self.engines, *self.launchers]:
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
        self.done.append(Done(number, round(self.elapsed_s, 2), kind, what))
        self.say(f"{self.leg.name}  {self.elapsed_s:7.2f} s  fault {number:3}  {kind}: {what}")

    def problem(self, text: str) -> None:
        if text in self.problems:
            return
        self.problems.append(text)
        self.say(f"{self.leg.name}  {self.elapsed_s:7.2f} s  PROBLEM: {text}")

    def engine_serves(self) -> bool:
        process = self.producers[0].process
        return process is not None and _has_served(process)

    def have_left_others(self) -> bool:
        """Whether a trainer that is gone has left ranks, or a producer its engine's process. One that was killed while
        it booted does, for the five minutes that vLLM gives the two to find each other."""
        parents = [*self.launchers, *(each for each in self.engines if _has_served(each))]
        return any(each.left_behind() for each in parents)

    def newest_epoch(self) -> int:
        files = (self.run_folder / "checkpoints").glob("epoch-*")
        return max((int(file.name.partition("-")[2]) for file in files), default=-1)

    def num_steps(self) -> int:
        return self.steps.read_bytes().count(b"\n") if self.steps.exists() else 0

    def _read_commit(self) -> dict[bytes, bytes]:
        try:
            return self.server.client.hgetall(self.keys.commit)  # type: ignore[return-value]
        except redis.RedisError:
            return {}


def _with_parent(pid: int) -> tuple[int, ...]:
    """A process id and that of its parent, if it lives."""
    try:
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return (pid,)


def _has_served(producer: Process) -> bool:
    return "ready to serve" in producer.output()
