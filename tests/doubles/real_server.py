"""A real Redis or Valkey at one address that tests can stop, restart and freeze."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import redis

from penstock.deploy.launch.server_binary import find_server

START_S = 60.0
"""Allows for a busy machine and an append-only file to load."""


def installed_servers() -> dict[str, Path]:
    """Returns the server binaries installed here, by name."""
    redis_server = shutil.which("redis-server")
    return {"valkey": find_server()} | ({} if redis_server is None else {"redis": Path(redis_server)})


T = TypeVar("T")


def free_port() -> int:
    """Returns a port that is free now, below those that the kernel gives to sockets which ask for any."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(end, 20_000))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def at_free_port(start: Callable[[int], T]) -> T:
    """Returns `start(port)`, tried with other ports if it fails: another process may have taken the first one."""
    for attempts_left in reversed(range(5)):
        try:
            return start(free_port())
        except (RuntimeError, AssertionError):
            if not attempts_left:
                raise
    raise AssertionError


class RealServer:
    """A server on a UNIX socket in its own folder. Its append-only file is synced at each write: a kill loses nothing.

    environment: variables of the server's process in addition to those of this one.
    """

    def __init__(self, binary: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ | (environment or {})
        # Not under tmp_path: a socket's path may have at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-redis-"))
        self._command = [str(binary), "--port", "0", "--unixsocket", str(self._folder / "redis.sock")]
        self._command += ["--dir", str(self._folder), "--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        self._command += ["--maxmemory-policy", "noeviction", *arguments]
        self.process: subprocess.Popen | None = None
        self.socket = self._folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.client = redis.Redis.from_url(self.url, protocol=2)
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        with (self._folder / "redis.log").open("ab") as output:
            self.process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environment)
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if self.client.ping():
                    return
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                time.sleep(0.01)
        self.stop()
        raise RuntimeError((self._folder / "redis.log").read_text())

    def stop(self) -> None:
        """Kills the server; after `start` it has all that it confirmed."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def remove(self) -> None:
        """Stops the server and removes its folder."""
        self.client.close()
        self.stop()
        shutil.rmtree(self._folder)


class LossyServer(RealServer):
    """A server that loses unsynced writes: after a restart it has the content of its append-only file at `mark`, or, if
    that is None, all that it confirmed."""

    mark: int | None = None

    @property
    def _log(self) -> Path:
        return next((self._folder / "appendonlydir").glob("*.incr.aof"))

    def remember(self) -> None:
        """Sets `mark` to the present size of the append-only file."""
        self.mark = self._log.stat().st_size

    def restart(self) -> None:
        self.stop()
        if self.mark is not None:
            os.truncate(self._log, self.mark)
        self.start()
