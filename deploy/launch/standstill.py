"""Says why a run cannot go on for now, and what helps."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from penstock.deploy.launch.child import Child
from penstock.deploy.launch.producer_pool import read_heartbeats
from penstock.deploy.launch.progress import Progress
from penstock.schemas.config import RunConfig
from penstock.schemas.heartbeat import Heartbeat
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.process.outage import OutageTracker, RedisGoneError, said_by, what_helps
from penstock.schemas.process.redis_url import configured_url, place_of
from penstock.schemas.producer_parity import ProducerParity, quarantine_in

_LOOK_S = 0.5
_SURE_S = 3.0
"""A reason that has held for so long is told."""
_LEAST_BYTES = 1 << 24
"""Free space below which a disk counts as full."""
_SILENT_S = 35.0
"""The shortest time without a batch that is told; longer than that after which the trainer logs what it waits for."""
_SILENT_BATCHES = 4
"""The same in batches, of their mean time; a first batch is expected to take `_FIRST_S` at most."""
_FIRST_S = 120.0
_MOST_CHARACTERS = 500


class Standstill:
    """The state of Redis, of the disk, of the run's processes on this machine and of its producers on any, read at most
    twice a second.

    heartbeats: by producer id; empty while Redis cannot be reached.
    reason: why the run cannot go on for now, with what helps, in one line; empty while it can.
    """

    def __init__(self, config: RunConfig, runs: Path, client: redis.Redis, progress: Progress) -> None:
        self.heartbeats: Mapping[str, Heartbeat] = {}
        self.reason = ""
        self._config = config
        self._folder = config.folder(runs)
        url = configured_url(config)
        self._where = f"Redis at {place_of(url)}" if url else "the run's own Redis"
        self._outage = OutageTracker(url or "", config.redis.outage_s)
        self._client = client
        self._progress = progress
        self._keys = Keys(config.name)
        self._has_ended = False
        self._next_look = 0.0
        self._served_at: float | None = None
        self._seen = ""
        self._since = 0.0

    def look(self, children: Sequence[Child], num_booting: int) -> Mapping[str, Heartbeat]:
        """Returns the heartbeats, read anew if it is time.

        children: the run's processes on this machine: its own Redis, the trainer, producers. num_booting: local
        producers that start.
        """
        if time.monotonic() >= self._next_look:
            reason = self._read(children, num_booting)
            now = time.monotonic()
            self._next_look = now + _LOOK_S
            if reason.partition(": ")[0] != self._seen.partition(": ")[0]:
                self._since = now
            self._seen = reason
            if now - self._since >= _SURE_S or not reason:
                self.reason = reason
        return self.heartbeats

    def _read(self, children: Sequence[Child], num_booting: int) -> str:
        self.heartbeats = {}
        stopped = {child.name: child.pid for child in children if child.is_suspended()}
        if "redis" in stopped:  # would not answer
            return _resume(stopped)
        try:
            self._client.hdel(self._keys.commit, "")  # deletes nothing, and is refused as any write is
            self.heartbeats = read_heartbeats(self._client, self._keys)
            memory: Any = self._client.info("memory")
            findings: Any = self._client.hgetall(self._keys.parity)
            self._has_ended = self._client.hget(self._keys.commit, Commit.FINISHED) == b"1"
        except redis.RedisError as error:
            return self._refusal(error)
        if self.heartbeats and self._served_at is None:
            self._served_at = time.monotonic()
        limit = memory.get("maxmemory", 0)
        if limit and memory["used_memory"] - memory.get("mem_not_counted_for_evict", 0) >= limit:
            helps = (
                "raise its maxmemory, and the run goes on"
                if configured_url(self._config)
                else "stop the run, and resume it with a larger redis.maxmemory_mb"
            )
            return f"{self._where} is full: {limit / 1e6:.0f} MB; {helps}"
        if problem := _folder_problem(self._folder):
            return f"{problem}, and the run goes on"
        if "trainer" in stopped or (stopped and not self.heartbeats):
            return _resume(stopped)
        return self._missing_producers(findings, num_booting) or self._silence(children)

    def _refusal(self, error: redis.RedisError) -> str:
        said = said_by(error)[:_MOST_CHARACTERS]
        limit = f"redis.outage_s = {self._config.redis.outage_s:g}"
        if remedy := what_helps(error):
            return f"{self._where} refuses to write: {said}; {remedy}, and the run goes on; it ends after {limit}"
        try:
            self._outage.check_refused(error)
        except RedisGoneError:
            return f"{self._where} refuses this run: {said}; its parts end; mend the user and password, and resume it"
        return (
            f"{self._where} does not answer: {said}; the run goes on once it does, and ends if it takes longer than "
            f"{limit}"
        )

    def _missing_producers(self, findings: Mapping[bytes, bytes], num_booting: int) -> str:
        if not self.heartbeats:
            if self._is_trained():
                return ""  # they end, while the trainer saves the model
            told = f"no producer is alive: the logs are in {self._folder / 'logs'}; the run goes on once one is started"
            return told if self._served_at is not None and not num_booting else ""
        quarantined: list[ProducerParity] = []
        for heartbeat in self.heartbeats.values():
            finding = quarantine_in(findings.get((heartbeat.instance or heartbeat.producer_id).encode()))
            if finding is None:
                return ""
            quarantined.append(finding)
        first = quarantined[0]
        return (
            f"every producer is quarantined: {first.producer_id}: {first.reason[:_MOST_CHARACTERS]}; repair its engine "
            f"and start it again (`penstock producers {self._config.name}` shows all)"
        )

    def _silence(self, children: Sequence[Child]) -> str:
        """Says what the trainer has logged last, if there was no batch for much longer than they take."""
        progress, since = self._progress, self._progress.seen_at or self._served_at
        trainer = next((child for child in children if child.name == "trainer"), None)
        if trainer is None or since is None or self._is_trained():
            return ""
        silent_s, rate = time.monotonic() - since, progress.updates_per_s
        if silent_s < max(_SILENT_S, _SILENT_BATCHES / rate if rate else _FIRST_S):
            return ""
        said = trainer.last_record(time.time() - silent_s) or f"process {trainer.pid} logs nothing"
        return (
            f"no batch is trained: for {silent_s:.0f} s; {said[:_MOST_CHARACTERS]} (the trainer's log is {trainer.log})"
        )

    def _is_trained(self) -> bool:
        last = self._progress.update
        return self._has_ended or (last is not None and last.update >= self._config.num_updates)


def _resume(stopped: Mapping[str, int]) -> str:
    names = " and ".join(stopped)
    pids = " ".join(map(str, stopped.values()))
    return f"{names} {'are' if len(stopped) > 1 else 'is'} suspended (SIGSTOP): `kill -CONT {pids}` continues"


def _folder_problem(folder: Path) -> str:
    """Returns why nothing can be written to a run's folder, and what helps; empty if something can."""
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return f"the run's folder cannot be read: {error}; put it back"
    free = disk.f_bavail * disk.f_frsize
    if free < _LEAST_BYTES:
        return f"the disk of {folder} is full: {free / 1e6:.0f} MB are free; make room"
    if disk.f_files and not disk.f_favail:
        return f"the disk of {folder} is full: it takes no more files (`df -i`); delete some"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written: it is read-only; make it writable"
    return ""
