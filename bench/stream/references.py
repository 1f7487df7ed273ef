"""The reference without Penstock: a plain TCP connection."""

import socket
import time

import redis

from bench.result import BenchError
from bench.section import Bench, found_apart, start_apart, wait_for
from bench.stream.ends import Span
from bench.stream.load import Send

MEGABYTE = 1_000_000
RECEIVE_BYTES = 65536
"""The size of redis-py's reads from its socket."""


def loopback_mb_per_s(bench: Bench, message_bytes: int, num_messages: int) -> float:
    """Measures the rate at which Python receives messages of this size over TCP from another process."""
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        job = Send(port=port, message_bytes=message_bytes, num_messages=num_messages)
        sender = start_apart("sender", "bench.stream.load:send", job, bench.folder)
        connection, _ = listener.accept()
    received = 0
    with connection:
        while num_bytes := connection.recv_into(buffer):
            received += num_bytes
        ended = time.monotonic()
    wait_for([sender])
    began, _ = found_apart("sender", Span, bench.folder)
    if received != message_bytes * num_messages:
        raise BenchError(f"{received} bytes over loopback, expected {message_bytes * num_messages}")
    return received / (ended - began) / MEGABYTE


def open_tcp_port(client: "redis.Redis") -> int:
    """Makes the server listen on loopback too; returns the port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    client.config_set("bind", "127.0.0.1")
    client.config_set("port", port)
    return port
