"""Finds the first free port, starting at a configured one."""

import logging
from collections.abc import Callable
from typing import TypeVar

from penstock.schemas.config import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

PORTS_TRIED = 256
EVERYWHERE = ("", "0.0.0.0", "::")
"""Hosts that mean every address of this machine."""


def authority(host: str, port: int) -> str:
    """Returns `host:port` as URLs and Prometheus write it: an IPv6 address is in brackets (RFC 3986, section 3.2.2)."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def on_free_port(section: str, host: str, first: int, listen: Callable[[int], T]) -> T:
    """Calls `listen(port)` for each port from `first` until one is free; 0 lets the system choose.

    Args:
        section: of the run file, for messages.

    Raises:
        ConfigError: the host cannot be listened on, or no port in the range is free.
    """
    last = first if first == 0 else min(first + PORTS_TRIED - 1, 65535)
    reason: OSError | None = None
    for port in range(first, last + 1):
        try:
            result = listen(port)
        except OSError as error:
            reason = error
            continue
        if port != first:
            log.info("%s.port = %d is in use: %s on port %d", section, first, section, port)
        return result
    raise ConfigError(
        f"{section}.host = {host!r}, {section}.port = {first}: cannot listen there nor on the ports up to {last}: "
        f"{reason}"
    )
