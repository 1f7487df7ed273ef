"""The local producers: booted in parallel where the cores allow, restarted when they die."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import redis

from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.live_view import View
from penstock.schemas.config import ProducersConfig
from penstock.schemas.heartbeat import Heartbeat, decode_heartbeat
from penstock.schemas.keys import Keys

MAX_RESTARTS = 3
"""Restarts of one producer before the run fails."""
MAX_BOOTS = 2
"""Failed boots of a producer, in a row, after which the run fails."""
_HEALTHY_S = 600.0
"""A producer that has served for this long has its count of restarts reset."""
_BOOT_S = 1800.0
_BACKOFF_S = 1.0
_UNUSABLE_INPUT = 2
"""Exit status after which a restart is pointless."""


class PartDied(RuntimeError):
    """A part of the run ended, and the run cannot continue. The message names the part, its status and its log.

    reason: the error that it has logged, which the message begins with; empty if it ended without one.
    """

    def __init__(self, child: Child, why: str) -> None:
        self.reason = child.last_error()
        said = f"its log is {child.log}" if self.reason else f"the end of {child.log}:\n{child.last_lines()}"
        super().__init__("; ".join(filter(None, (self.reason, f"{child.name} {why}", said))))
        self.part = child.name
        self.started_s = child.started_s


def read_heartbeats(client: redis.Redis, keys: Keys) -> dict[str, Heartbeat]:
    """Reads the heartbeats by producer id, without those of another release: `penstock producers` names them."""
    names = list(client.scan_iter(keys.producer_pattern, count=1000))
    values: list[Any] = client.mget(names) if names else []
    found = {}
    for value in filter(None, values):
        with contextlib.suppress(msgspec.DecodeError):
            heartbeat = decode_heartbeat(value)
            found[heartbeat.producer_id] = heartbeat
    return found


@dataclass
class _Seat:
    """One local producer: its process, and counts of its earlier processes."""

    name: str
    child: Child | None = None
    start_at: float = 0.0
    booted_at: float = 0.0
    is_late: bool = False
    served_since: float | None = None
    num_boots: int = 0
    num_restarts: int = 0


def boots_at_once(config: ProducersConfig) -> int:
    """Returns how many of a run's parts may boot in parallel: cores over threads of an engine, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    num_cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, num_cores // config.num_threads)


class ProducerPool:
    """Producers `producer-0` to `producer-<count - 1>`.

    `tick` does not wait. At most `boots_at_once` producers boot in parallel; after a failed boot, one at a time. A boot
    ends with the first heartbeat of its process.
    """

    def __init__(self, count: int, boots_at_once: int, start: Callable[[str], Child], view: View) -> None:
        self._boots_at_once = boots_at_once
        self._start = start
        self._view = view
        self._seats = [_Seat(f"producer-{n}") for n in range(count)]

    @property
    def children(self) -> list[Child]:
        return [seat.child for seat in self._seats if seat.child is not None]

    @property
    def num_booting(self) -> int:
        return sum(seat.child is not None and seat.served_since is None for seat in self._seats)

    @property
    def is_settled(self) -> bool:
        """True if another part may boot now: every producer serves, or boots where parts may boot in parallel."""
        parallel = self._boots_at_once > 1
        return all(seat.served_since is not None or (parallel and seat.child is not None) for seat in self._seats)

    def tick(self, heartbeats: Mapping[str, Heartbeat], *, finished: Callable[[], bool]) -> None:
        """Starts the producers that are due, and restarts those that have died. Raises PartDied if one does not start,
        or died too often."""
        for seat in self._seats:
            if seat.child is not None and seat.child.poll() is not None:
                self._restart_later(seat, seat.child, finished)
            elif seat.child is not None and seat.served_since is None:
                self._watch_boot(seat, seat.child, heartbeats)
        num_booting = self.num_booting
        for seat in self._seats:
            if num_booting < self._boots_at_once and seat.child is None and time.monotonic() >= seat.start_at:
                self._view.state(seat.name, "starting the engine")
                seat.child, seat.booted_at = self._start(seat.name), time.monotonic()
                num_booting += 1

    def _watch_boot(self, seat: _Seat, child: Child, heartbeats: Mapping[str, Heartbeat]) -> None:
        heartbeat = heartbeats.get(seat.name)
        if heartbeat is not None and heartbeat.pid == child.pid:
            seat.served_since = time.monotonic()
            seat.num_boots = 0
            self._view.state(seat.name, "ready")
        elif time.monotonic() - seat.booted_at > _BOOT_S:
            seat.is_late = True
            child.kill()

    def _restart_later(self, seat: _Seat, child: Child, finished: Callable[[], bool]) -> None:
        status = child.poll() or 0
        if status == 0 and finished():
            return
        died, left = describe_status(status), ""
        if seat.is_late:
            died, seat.is_late = f"was ended after {_BOOT_S / 60:.0f} minutes of booting", False
        if status == _UNUSABLE_INPUT:
            raise PartDied(child, f"{died}: it cannot use its settings")
        if seat.served_since is None:
            seat.num_boots += 1
            if seat.num_boots >= MAX_BOOTS:
                raise PartDied(child, f"{died} before it served, {seat.num_boots} times in a row")
            self._boots_at_once = 1
            delay_s = _BACKOFF_S
        else:
            if time.monotonic() - seat.served_since > _HEALTHY_S:
                seat.num_restarts = 0
            if seat.num_restarts >= MAX_RESTARTS:
                raise PartDied(child, f"{died} after {seat.num_restarts} restarts")
            delay_s = _BACKOFF_S * 2**seat.num_restarts
            seat.num_restarts += 1
            left = f"others take its groups over within {self._view.config.producers.claim_idle_s:.0f} s"
        told = (f"{died}, starting again in {delay_s:.0f} s", child.last_error(), left, f"log: {child.log}")
        self._view.state(seat.name, "; ".join(filter(None, told)))
        seat.child = None
        seat.served_since = None
        seat.start_at = time.monotonic() + delay_s

    def kill_booting(self) -> None:
        """Kills the producers that never served: they hold no prompt, and a booting engine handles no signal."""
        for seat in self._seats:
            if seat.child is not None and seat.served_since is None and seat.child.poll() is None:
                seat.child.end()
                self._view.state(seat.name, "stopped before it served: the run ends")

    def terminate(self) -> None:
        """Asks every producer to hand back what is in flight and exit."""
        for child in self.children:
            child.send(signal.SIGTERM)
