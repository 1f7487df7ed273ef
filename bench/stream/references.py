"""References without Penstock: `redis-benchmark`, and a plain TCP connection."""

import csv
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import redis

from bench.result import BenchError
from bench.section import Bench, found_apart, start_apart, wait_for
from bench.stream.ends import Span
from bench.stream.load import Send
from penstock.deploy.launch.server_binary import find_server
from penstock.schemas.keys import Field, Kind

MEGABYTE = 1_000_000
RECEIVE_BYTES = 65536
"""The size of redis-py's reads from its socket."""
USER = "benchmark"
TIMEOUT_S = 300.0


def add_benchmark_user(client: "redis.Redis") -> None:
    """Adds a user that accepts any password, since redis-benchmark takes one on its command line only. The server
    listens on this machine alone, and holds a benchmark's records for some seconds."""
    client.acl_setuser(USER, enabled=True, nopass=True, keys=["*"], commands=["+@all"])


def benchmark_xadd(socket_path: str, stream: str, payload_bytes: int, num_requests: int) -> float:
    """Returns the entries per second that one client of redis-benchmark appends one at a time."""
    fields = [Field.INDEX.decode(), "1", Field.KIND.decode(), Kind.GROUP.decode(), Field.PAYLOAD.decode()]
    command = ["-n", str(num_requests), "-x", "XADD", stream, "*", *fields]
    return _requests_per_s(["-s", socket_path], command, b"x" * payload_bytes)


def _requests_per_s(address: Sequence[str], command: Sequence[str], standard_input: bytes) -> float:
    full = [str(_binary()), *address, "--user", USER, "-a", "any", "-c", "1", "--csv", *command]
    done = subprocess.run(full, input=standard_input, capture_output=True, timeout=TIMEOUT_S)
    rows = list(csv.reader(done.stdout.decode(errors="replace").splitlines()))
    # It reports an error answer among its output and goes on to the next request.
    if done.returncode or len(rows) != 2 or rows[0][:2] != ["test", "rps"]:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise BenchError(f"{full[0]}: {said or f'ended with status {done.returncode} and no output'}")
    rate = float(rows[1][1])
    if not math.isfinite(rate):
        raise BenchError(f"{full[0]}: done within a millisecond, too soon to say how fast")
    return rate


def _binary() -> Path:
    for name in ("redis-benchmark", "valkey-benchmark"):
        beside, on_path = find_server().parent / name, shutil.which(name)
        if os.access(beside, os.X_OK):
            return beside
        if on_path:
            return Path(on_path)
    raise BenchError("no redis-benchmark or valkey-benchmark on PATH; it comes with redis-server")


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
