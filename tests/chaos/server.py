"""The suite's Redis or Valkey: it can be killed, stopped, emptied, and lose what a power loss would take."""

import shutil
import signal
import time
from collections import deque
from pathlib import Path
from random import Random

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.deploy.launch.child import Child

WINDOW_S = 1.0
"""The most that a power loss may cost under `everysec`: the server syncs its append-only file once a second."""


class ChaosServer:
    """A server on a UNIX socket with an append-only file.

    A power loss is simulated: the server is killed with SIGKILL, and the append-only file (the incremental part of the
    multi-part one; no rewrite happens in so short a run) is cut back to its size at a random moment of the last second,
    plus a few bytes, so that the cut also falls into a command or a MULTI. Under `everysec` all of that second may be
    lost; under `always` an answered write never is, and only the kill remains.
    """

    def __init__(self, binary: Path, folder: Path, *, appendfsync: str) -> None:
        self.folder = folder
        self.appendfsync = appendfsync
        self.socket = folder / "redis.sock"
        self._data = folder / "data"
        self._binary = binary
        self._sizes: deque[tuple[float, int]] = deque()
        self.child: Child | None = None
        self.client = redis.Redis(
            unix_socket_path=str(self.socket), protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=30.0
        )
        self.is_stopped = False

    def start(self) -> None:
        """Starts the server; `answers` tells when it is ready."""
        self._data.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        command = [str(self._binary), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._data)]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", self.appendfsync]
        command += ["--maxmemory", "256mb", "--maxmemory-policy", "noeviction", "--loglevel", "warning"]
        self.child = Child("redis", command, log=self.folder / "redis.log")
        self._sizes.clear()
        self.is_stopped = False

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.poll() is None

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

    def kill(self) -> None:
        assert self.child is not None
        self.child.kill()
        while self.child.poll() is None:
            time.sleep(0.001)
        self.socket.unlink(missing_ok=True)

    def lose_power(self, draw: Random) -> str:
        """Kills the server and cuts its file; returns a description of what was lost."""
        self.watch()
        self.kill()
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
        self.kill()
        shutil.rmtree(self._data)

    def freeze(self) -> None:
        assert self.child is not None
        self.is_stopped = True
        self.child.send(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.child is not None
        self.is_stopped = False
        self.child.send(signal.SIGCONT)

    def limit_memory(self, room: int | None) -> None:
        """Sets the memory limit to `room` bytes above the memory in use; None removes the limit."""
        limit = 256 << 20 if room is None else self.client.info("memory")["used_memory"] + room
        self.client.config_set("maxmemory", limit)

    def remove(self) -> None:
        self.client.close()
        if self.child is not None:
            self.child.send(signal.SIGCONT)
            self.kill()

    def _append_only_file(self) -> Path | None:
        files = sorted(self._data.glob("appendonlydir/*.incr.aof"), key=lambda file: int(file.name.split(".")[-3]))
        return files[-1] if files else None
