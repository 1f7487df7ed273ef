"""The suite's server, with faults that only a server of one's own can have."""

import shutil
import time
from collections import deque
from pathlib import Path
from random import Random

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from real_server import RealServer

WINDOW_S = 1.0
"""The most that a power loss may cost under `everysec`: the server syncs its append-only file once a second."""


class ChaosServer(RealServer):
    """A server on a UNIX socket with an append-only file.

    A power loss is simulated: the server is killed with SIGKILL, and the append-only file (the incremental part of the
    multi-part one; no rewrite happens in so short a run) is cut back to its size at a random moment of the last second,
    plus a few bytes, so that the cut also falls into a command or a MULTI. Under `everysec` all of that second may be
    lost; under `always` an answered write never is, and only the kill remains.
    """

    def __init__(self, binary: Path, *, appendfsync: str) -> None:
        self.appendfsync = appendfsync
        self._sizes: deque[tuple[float, int]] = deque()
        self.is_stopped = False
        super().__init__(binary, "--appendfsync", appendfsync, "--maxmemory", "256mb")
        self.client.close()
        self.client = redis.Redis.from_url(self.url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=30.0)

    def start(self) -> None:
        super().start()
        self._sizes.clear()
        self.is_stopped = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def answers(self) -> bool:
        try:
            return bool(self.is_running and not self.is_stopped and self.client.ping())
        except redis.RedisError:
            return False

    def watch(self) -> None:
        """Records the size of the append-only file. Must be called often."""
        file = self._append_only_file()
        if file is None:
            return
        now = time.monotonic()
        self._sizes.append((now, file.stat().st_size))
        while self._sizes and self._sizes[0][0] < now - 2 * WINDOW_S:
            self._sizes.popleft()

    def lose_power(self, draw: Random) -> str:
        """Kills the server and cuts its file; returns a description of what was lost."""
        self.watch()
        self.stop()
        file = self._append_only_file()
        if file is None or self.appendfsync == "always":
            return "nothing was unsynced"
        size = file.stat().st_size
        back_s = draw.uniform(0.0, WINDOW_S)
        moment = time.monotonic() - back_s
        kept = next((length for when, length in self._sizes if when >= moment), size)
        kept = min(size, kept + draw.randrange(0, 200))
        with file.open("r+b") as stream:
            stream.truncate(kept)
        return f"lost the last {size - kept:,} bytes ({back_s:.2f} s) of its append-only file"

    def empty(self) -> None:
        """Kills the server and removes its data."""
        self.stop()
        shutil.rmtree(self._folder / "appendonlydir")

    def freeze(self) -> None:
        self.is_stopped = True
        super().freeze()

    def thaw(self) -> None:
        self.is_stopped = False
        super().thaw()

    def limit_memory(self, room: int | None) -> None:
        """Sets the memory limit to `room` bytes above the memory in use; None removes the limit."""
        limit = 256 << 20 if room is None else self.client.info("memory")["used_memory"] + room
        self.client.config_set("maxmemory", limit)

    def _append_only_file(self) -> Path | None:
        files = self._folder.glob("appendonlydir/*.incr.aof")
        return max(files, key=lambda file: int(file.name.split(".")[-3]), default=None)
