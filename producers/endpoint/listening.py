"""A place for the endpoint to listen."""

import socket

from penstock.schemas.config import ConfigError

PORTS_TRIED = 256


def listen(host: str, first: int) -> tuple[socket.socket, int]:
    """A listening socket and its port, the first free one from `first` on; 0 lets the system choose.

    Raises:
        ConfigError: the host cannot be listened on, or no port in the range is free.
    """
    last = first if first == 0 else min(first + PORTS_TRIED - 1, 65535)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason: OSError | None = None
    for port in range(first, last + 1):
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            reason = error
            continue
        return listening, listening.getsockname()[1]
    raise ConfigError(
        f"endpoint.host = {host!r}, endpoint.port = {first}: cannot listen there nor on the ports up to {last}: "
        f"{reason}"
    )
