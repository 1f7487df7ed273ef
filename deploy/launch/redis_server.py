"""A run's own Redis or Valkey server on a private UNIX socket."""

import json
import os
import secrets
import signal
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.deploy.launch.child import Child, describe_status
from penstock.deploy.launch.server_binary import find_server
from penstock.schemas.config import ConfigError
from penstock.schemas.process.files import folder_for_sockets, write_whole
from penstock.schemas.process.redis_url import connection_file

_MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un holds 108, the last of them a zero
_LONGEST_BASE = _MAX_SOCKET_PATH_BYTES - len("/penstock-abcdefgh/redis.sock")
_ANSWER_S = 5.0
_START_S = 10.0
_LOAD_S = 600.0  # a long append-only file is read before the first command is answered
_STOP_S = 15.0


class ServerError(RuntimeError):
    """The server could not be started or reached; the message says why."""


def connect(url: str, name: str = "REDIS_URL") -> redis.Redis:
    """Makes a client for short commands, without retries. name: the setting that the URL comes from. Raises ConfigError
    if it is not a Redis URL."""
    try:
        return redis.Redis.from_url(
            url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S
        )
    except ValueError:  # its message may quote a part of the password
        raise ConfigError(f"{name} is no Redis URL") from None


class RedisServer:
    """A running server that dies with this process. Its data in `<run_folder>/redis/` outlive it.

    url: with the password, which `connection.json` (mode 0600) holds too, for later commands.
    lock: a file descriptor that the server keeps open while it lives.
    binary: of the server; by default the one that is installed with Penstock.

    Raises:
        ConfigError: no server binary.
        ServerError: it did not start; the message holds the end of its log.
    """

    def __init__(
        self, run_folder: Path, *, maxmemory_mb: int, lock: int | None = None, binary: Path | None = None
    ) -> None:
        self.folder = (run_folder / "redis").absolute()
        self._binary = binary or find_server()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self._connection_file = connection_file(run_folder)
        self._remove_predecessor_files()
        self._socket = self._choose_socket()
        password = secrets.token_urlsafe(24)
        self.url = f"unix://:{password}@{quote(str(self._socket))}"
        place = {"url": self.url, "socket": str(self._socket)}
        write_whole(self._connection_file, json.dumps(place), mode=0o600)
        self.child = Child(
            "redis",
            [str(self._binary), "-"],  # the configuration comes on standard input: a command line is public
            log=run_folder / "logs" / "redis.log",
            death_signal=signal.SIGTERM,  # lets it write its append-only file
            standard_input=self._configuration(password, maxmemory_mb).encode(),
            pass_fds=() if lock is None else (lock,),
        )
        self.client = connect(self.url)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _configuration(self, password: str, maxmemory_mb: int) -> str:
        settings = {
            "port": "0",
            "unixsocket": _quoted(self._socket),
            "unixsocketperm": "700",
            "requirepass": password,
            "dir": _quoted(self.folder),
            "daemonize": "no",
            "databases": "1",
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "everysec",
            # A rewrite forks and takes a core for a moment; the file of a short run never needs one.
            "auto-aof-rewrite-min-size": "256mb",
            "maxmemory": f"{maxmemory_mb}mb",
            "maxmemory-policy": "noeviction",
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())

    def _choose_socket(self) -> Path:
        socket = self.folder / "redis.sock"
        if len(os.fsencode(socket)) <= _MAX_SOCKET_PATH_BYTES:
            return socket
        return Path(tempfile.mkdtemp(prefix="penstock-", dir=folder_for_sockets(_LONGEST_BASE))) / "redis.sock"

    def _remove_predecessor_files(self) -> None:
        try:
            socket = Path(json.loads(self._connection_file.read_text("utf-8"))["socket"])
        except (FileNotFoundError, KeyError, ValueError):
            return
        _remove_socket(socket, self.folder)
        self._connection_file.unlink()

    def _wait_until_ready(self) -> None:
        """Waits for the first answer: `_START_S` at most, `_LOAD_S` while the server reads its data."""
        started = time.monotonic()
        limit_s = _START_S
        while True:
            if self.child.poll() is not None:
                status = describe_status(self.child.poll() or 0)
                raise ServerError(f"redis {status} at start; the end of {self.child.log}:\n{self.child.last_lines()}")
            try:
                self.client.ping()
                return
            except redis.BusyLoadingError:
                limit_s = _LOAD_S
            except redis.ConnectionError:
                pass
            if time.monotonic() - started > limit_s:
                raise ServerError(f"redis does not answer after {limit_s:.0f} s; its log is {self.child.log}")
            time.sleep(0.003)

    def stop(self) -> None:
        """Ends the server, which syncs its append-only file; kills it after `_STOP_S`."""
        self.client.close()
        self.child.send(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while self.child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """Ends the server at once."""
        self.child.end()
        self._connection_file.unlink(missing_ok=True)
        _remove_socket(self._socket, self.folder)


def _remove_socket(socket: Path, data_folder: Path) -> None:
    socket.unlink(missing_ok=True)
    if socket.parent != data_folder and socket.parent.name.startswith("penstock-") and socket.parent.is_dir():
        socket.parent.rmdir()


def _quoted(path: Path) -> str:
    """A path as the server's configuration parser reads it back."""
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
