"""Says why a run cannot go on for now, and what helps."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import redis

from penstock.deploy.launch.producer_pool import read_heartbeats
from penstock.schemas.config import RunConfig
from penstock.schemas.heartbeat import Heartbeat
from penstock.schemas.keys import Keys
from penstock.schemas.process.outage import has_code
from penstock.schemas.process.redis_url import configured_url, place_of
from penstock.schemas.producer_parity import ProducerParity, quarantine_in

_LOOK_S = 0.5
_SURE_S = 3.0
"""A reason that has held for so long is told."""
_LEAST_BYTES = 1 << 24
"""Free space below which a disk counts as full."""
_MOST_CHARACTERS = 500


class Standstill:
    """The state of Redis, of the disk and of a run's producers on any machine, read at most twice a second.

    heartbeats: by producer id; empty while Redis cannot be reached.
    reason: why the run cannot go on for now, with what helps, in one line; empty while it can.
    """

    def __init__(self, config: RunConfig, runs: Path, client: redis.Redis) -> None:
        self.heartbeats: Mapping[str, Heartbeat] = {}
        self.reason = ""
        self._config = config
        self._folder = config.folder(runs)
        url = configured_url(config)
        self._where = f"Redis at {place_of(url)}" if url else "the run's own Redis"
        self._client = client
        self._keys = Keys(config.name)
        self._next_look = 0.0
        self._has_served = False
        self._seen = ""
        self._since = 0.0

    def look(self, num_booting: int) -> Mapping[str, Heartbeat]:
        """Returns the heartbeats, read anew if it is time. num_booting: local producers that start."""
        if time.monotonic() >= self._next_look:
            reason = self._read(num_booting)
            now = time.monotonic()
            self._next_look = now + _LOOK_S
            if reason.partition(":")[0] != self._seen.partition(":")[0]:
                self._since = now
            self._seen = reason
            if now - self._since >= _SURE_S or not reason:
                self.reason = reason
        return self.heartbeats

    def _read(self, num_booting: int) -> str:
        self.heartbeats = {}
        try:
            self._client.ping()  # refused like a write while a disk is full
            self.heartbeats = read_heartbeats(self._client, self._keys)
            memory: Any = self._client.info("memory")
            findings: Any = self._client.hgetall(self._keys.parity)
        except redis.RedisError as error:
            return self._refusal(error)
        self._has_served |= bool(self.heartbeats)
        limit = memory.get("maxmemory", 0)
        if limit and memory["used_memory"] >= limit:
            setting = "maxmemory" if configured_url(self._config) else "redis.maxmemory_mb"
            return f"{self._where} is full: {limit / 1e6:.0f} MB; stop the run, and resume it with a larger {setting}"
        if (free := shutil.disk_usage(self._folder).free) < _LEAST_BYTES:
            return f"the disk of {self._folder} is full: {free / 1e6:.0f} MB are free; make room, and the run goes on"
        return self._missing_producers(findings, num_booting)

    def _refusal(self, error: redis.RedisError) -> str:
        said = " ".join(str(error).split())[:_MOST_CHARACTERS] or type(error).__name__
        if isinstance(error, redis.ResponseError) and has_code(error, "MISCONF"):
            return f"{self._where} refuses to write: {said}; make room on its disk, and the run goes on"
        return (
            f"{self._where} does not answer: {said}; the run goes on once it does, and ends if it takes longer than "
            f"redis.outage_s = {self._config.redis.outage_s:g}"
        )

    def _missing_producers(self, findings: Mapping[bytes, bytes], num_booting: int) -> str:
        if not self.heartbeats:
            told = f"no producer is alive: the logs are in {self._folder / 'logs'}; the run goes on once one is started"
            return told if self._has_served and not num_booting else ""
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
