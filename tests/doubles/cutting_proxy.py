"""A proxy in front of a real server that cuts, delays or refuses connections at a chosen command.

It parses the protocol in both directions, so it knows which reply answers which command, and whether the server has
executed the command at a cut.
"""

import contextlib
import hashlib
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from penstock.consumers.stream.scripts import SCRIPTS

When = Literal["before", "reply", "within"]
TRAINER_SCRIPTS = {hashlib.sha1(script.encode()).hexdigest(): name for name, script in SCRIPTS.items()}


@dataclass
class Fault:
    """A fault at one command. `happened` is set when it occurs.

    when: `before`: the server never receives the command. `reply`: it executes the command, and the reply is lost.
        `within`: half of the reply gets through.
    """

    command: str
    nth: int
    when: When
    held: bool = False
    """Instead of a cut, the command (`before`) or its reply waits for `release`."""
    happened: threading.Event = field(default_factory=threading.Event)
    _may_go_on: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout_s: float = 60.0) -> None:
        """Waits until the fault has occurred."""
        assert self.happened.wait(timeout_s), f"no {self.command} came in {timeout_s} s"

    def hold(self) -> None:
        """Waits until the fault is released."""
        self._may_go_on.wait()

    def release(self) -> None:
        """Forwards a held command or reply."""
        self._may_go_on.set()


class CuttingProxy:
    """Listens on a UNIX socket for the server at `url`; `proxy.url` carries the same user and password.

    Commands are counted by name from 1, over all connections, from the call of `cut` on: `XREAD`, `EXEC`, and a script
    by the name that `names` gives its SHA1 (`EVALSHA` without one). Blocking reads and pipelines pass unchanged.

    Use it as a context manager.
    """

    def __init__(self, url: str, names: dict[str, str] | None = None) -> None:
        self.names = names if names is not None else {}
        self.num_seen: Counter[str] = Counter()
        """Commands received, by name."""
        self.num_cuts = 0
        self._faults: list[Fault] = []
        self._left: dict[int, int] = {}
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._refused_until = 0.0
        self._num_cuts_all = 0
        # Not under tmp_path: a socket's path may have at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-proxy-"))
        parts = urlsplit(url)
        user = parts.netloc.rpartition("@")[0]
        self.url = f"unix://{user + '@' if user else ''}{self._folder / 'proxy.sock'}"
        self._upstream = urlunsplit(parts)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "proxy.sock"))
        self._listener.listen(64)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def cut(self, command: str, nth: int = 1, when: When = "reply") -> Fault:
        """Cuts the connection that sends the `nth` such command from now on."""
        return self._add(Fault(command, nth, when))

    def hold(self, command: str, nth: int = 1, when: When = "reply") -> Fault:
        """Holds the `nth` such command, or its reply, until the fault's `release`."""
        return self._add(Fault(command, nth, when, held=True))

    def cut_all(self) -> None:
        """Cuts every connection."""
        with self._lock:
            self._num_cuts_all += 1
            links = list(self._links)
        for link in links:
            link.close()

    def refuse(self, seconds: float = float("inf")) -> None:
        """Cuts every connection and refuses new ones for `seconds`, or until `accept`."""
        self._refused_until = time.monotonic() + seconds
        self.cut_all()

    def accept(self) -> None:
        """Accepts connections again."""
        self._refused_until = 0.0

    def point_to(self, url: str) -> None:
        """Forwards to another server from now on, as after a failover, and cuts every connection."""
        self._upstream = url
        self.cut_all()

    def __enter__(self) -> "CuttingProxy":
        return self

    def __exit__(self, *_: object) -> None:
        for fault in self._faults:
            fault.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(10)
        self.refuse()
        shutil.rmtree(self._folder)

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
            self._left[id(fault)] = fault.nth
        return fault

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            num_cuts_all = self._num_cuts_all
            try:
                if time.monotonic() < self._refused_until:
                    raise ConnectionRefusedError
                server = connect(self._upstream)
            except OSError:
                client.close()
                continue
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
                too_late = num_cuts_all != self._num_cuts_all
            if too_late:  # every connection was cut while this one was being made
                link.close()
            else:
                link.start()

    def forget(self, link: "_Link") -> None:
        with self._lock:
            self._links.discard(link)

    def fault_for(self, args: list[bytes]) -> Fault | None:
        """Counts a command; returns the fault that it triggers, if any."""
        name = args[0].decode().upper()
        if name == "EVALSHA":
            name = self.names.get(args[1].decode(), name)
        with self._lock:
            self.num_seen[name] += 1
            for fault in self._faults:
                if fault.command != name or not self._left[id(fault)]:
                    continue
                self._left[id(fault)] -= 1
                if not self._left[id(fault)]:
                    return fault
        return None

    def strike(self, fault: Fault) -> bool:
        """Waits for the release of a held command and returns False, or counts a cut and returns True."""
        if fault.held:
            fault.happened.set()
            fault.hold()
            return False
        self.num_cuts += 1
        return True


class _Link:
    """One client's connection: a thread for each direction."""

    def __init__(self, proxy: CuttingProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._expected: deque[Fault | None] = deque()
        """The fault, if any, of each command whose reply is outstanding."""
        self._closing = threading.Lock()

    def start(self) -> None:
        for work in (self._forward_commands, self._forward_replies):
            threading.Thread(target=self._until_closed, args=(work,), daemon=True).start()

    def close(self, fault: Fault | None = None) -> None:
        """Closes both directions; no reply can arrive any more once `fault.happened` is set."""
        with self._closing:
            for side in (self._client, self._server):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)
                side.close()
        self._proxy.forget(self)
        if fault is not None:
            fault.happened.set()

    def _until_closed(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (OSError, ValueError, EOFError):
            pass  # one side has closed, or the file object over it
        finally:
            self.close()

    def _forward_commands(self) -> None:
        stream = self._client.makefile("rb")
        while True:
            data, args = read_command(stream)
            fault = self._proxy.fault_for(args)
            if fault is not None and fault.when == "before":
                if self._proxy.strike(fault):
                    return self.close(fault)
                fault = None
            self._expected.append(fault)
            self._server.sendall(data)

    def _forward_replies(self) -> None:
        stream = self._server.makefile("rb")
        while True:
            reply = read_reply(stream)
            fault = self._expected.popleft()
            if fault is not None and self._proxy.strike(fault):
                if fault.when == "within":
                    self._client.sendall(reply[: len(reply) // 2])
                return self.close(fault)
            self._client.sendall(reply)


def connect(url: str) -> socket.socket:
    """Returns a socket connected to the server of a redis:// or unix:// URL."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(unquote(parts.path))
        except OSError:  # the server is down; a socket left to the collector would be a warning
            link.close()
            raise
        return link
    return socket.create_connection((parts.hostname, parts.port or 6379))


def read_command(stream: BinaryIO) -> tuple[bytes, list[bytes]]:
    """Reads a command; returns its bytes and its arguments."""
    data = _line(stream)
    args = []
    for _ in range(int(data[1:])):
        header = _line(stream)
        value = _exactly(stream, int(header[1:]) + 2)
        data += header + value
        args.append(value[:-2])
    return data, args


def read_reply(stream: BinaryIO) -> bytes:
    """Reads one reply of protocol 2, with nested ones."""
    data = _line(stream)
    kind, length = data[:1], data[1:-2]
    if kind == b"$" and int(length) >= 0:
        return data + _exactly(stream, int(length) + 2)
    if kind == b"*":
        return data + b"".join(read_reply(stream) for _ in range(max(0, int(length))))
    return data


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
