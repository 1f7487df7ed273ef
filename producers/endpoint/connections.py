"""Bounds the number of the endpoint's connections, so that the producer keeps file descriptors for its own work."""

import asyncio
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Container

from aiohttp import web

log = logging.getLogger(__name__)

MOST_DESCRIPTORS = 8192
"""The soft limit is raised to this, as far as the hard one allows; a larger one is used up to this."""
RESERVE = 128
"""Descriptors that no connection takes: for Redis, weights, metrics and logs."""
RECOUNT_S = 0.02
"""The shortest time between two counts of all connections, for which new ones wait while there are too many."""
LOG_S = 60.0
RETRY_S = 1.0
"""Pause after a connection that could not be accepted."""


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files; returns how many may be open, at most `MOST_DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, hard)
    if soft < most and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class Connections:
    """Accepts connections for an HTTP server.

    At most as many as descriptors are free, less `RESERVE`; of one peer half as many. Where that is used up, the oldest
    connections without a complete request give way, half of them at once; without any, the new connection is closed.

    answering: the connections whose request has arrived in full and is being answered; the server keeps it.
    """

    def __init__(self, listening: socket.socket, server: web.Server, answering: Container[asyncio.Protocol]) -> None:
        free = raise_descriptor_limit() - len(os.listdir("/dev/fd"))
        self._most = max(free - RESERVE, free // 2)
        self._most_of_a_peer = self._most // 2
        self._answering = answering
        self._listening = listening
        self._server = server
        self._by_peer: Counter[str | None] = Counter()
        """An upper bound on each peer's connections; `_make_room` counts them."""
        self._recount_at = self._log_at = 0.0

    async def accept(self) -> None:
        """Accepts connections until cancelled; closes the listening socket then."""
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        with self._listening:
            while True:
                try:
                    connection, (peer, *_) = self._listening.accept()
                except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                    await self._wait_for_connection()
                    continue
                except OSError as error:
                    self._warn(f"no connection can be accepted: {error}")
                    await asyncio.sleep(RETRY_S)
                    continue
                try:
                    await self._admit(connection, peer, loop)
                except asyncio.CancelledError:
                    connection.close()
                    raise

    async def _wait_for_connection(self) -> None:
        # `loop.sock_accept` loses the connection if it is cancelled at the moment of its arrival.
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(self._listening, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(self._listening)

    async def _admit(self, connection: socket.socket, peer: str, loop: asyncio.AbstractEventLoop) -> None:
        if not self._has_room(peer):
            await asyncio.sleep(self._recount_at - loop.time())
            self._recount_at = loop.time() + RECOUNT_S
            self._make_room(peer)
        if self._has_room(peer):
            self._by_peer[peer] += 1
            await loop.connect_accepted_socket(self._server, connection)
        else:
            connection.close()
            self._warn(f"connections of {peer} are refused: {self._by_peer[peer]} are being answered")

    def _has_room(self, peer: str) -> bool:
        return self._by_peer[peer] < self._most_of_a_peer and self._by_peer.total() < self._most

    def _make_room(self, peer: str) -> None:
        """Counts the connections; if there is still no room, closes some without a complete request."""
        whose = [(one, one.peername[0]) for one in self._server.connections if one.peername]
        self._by_peer = Counter(owner for _, owner in whose)
        if self._has_room(peer):
            return
        crowd = peer if self._by_peer[peer] >= self._most_of_a_peer else self._by_peer.most_common(1)[0][0]
        idle = [one for one, owner in whose if owner == crowd and one not in self._answering]
        for one in idle[: 1 + len(idle) // 2]:
            one.force_close()
            self._by_peer[crowd] -= 1
        if idle:
            self._warn(f"{crowd} has too many connections: those without a complete request are closed")

    def _warn(self, message: str) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._log_at:
            self._log_at = now + LOG_S
            log.warning("%s (room for %d, %d of a peer)", message, self._most, self._most_of_a_peer)
