"""A link with a limited total rate in bytes per second."""

import io
import socket
import threading
import time

PACKET_BYTES = 4096
"""The most that one connection receives before others get their turn."""


class SlowLink:
    """A rate that all readers share, as connections share a line. `num_bytes`: bytes received so far."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.num_bytes = 0

    def reader(self, source: socket.socket) -> io.BufferedReader:
        """Returns a reader of `source` at the link's rate."""
        # The kernel buffers next to nothing, so the sender is slowed down, too.
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PACKET_BYTES)
        return io.BufferedReader(_Slowly(source, self), PACKET_BYTES)

    def carry(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
            wait_s = self._free_at - time.monotonic()
        time.sleep(wait_s)


class _Slowly(io.RawIOBase):
    def __init__(self, source: socket.socket, link: SlowLink) -> None:
        self._source = source
        self._link = link

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def, override]
        num_bytes = self._source.recv_into(buffer, min(len(buffer), PACKET_BYTES))
        self._link.carry(num_bytes)
        return num_bytes
