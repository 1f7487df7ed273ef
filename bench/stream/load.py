"""A process that loads the stream from outside the measuring one: `python -m bench.stream.load NAME`."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from bench.result import BenchError
from bench.stream.ends import ProducerEnd, Span, group_of
from penstock.schemas.keys import Keys


class Append(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Producers' writers side by side, with a connection each, that encode and append a group for each claim.

    burst: groups that one of them gets at a time.
    """

    run: str
    num_writers: int
    groups_per_writer: int
    burst: int
    group_bytes: int


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sends the same bytes again and again over TCP."""

    port: int
    message_bytes: int
    num_messages: int


Job = Append | Send
Ready = Callable[[], None]
"""Reports that everything is prepared; returns at the signal to start."""


class LoadProcess:
    """A process that does one job after another. It prepares each, and begins when it is told to."""

    def __init__(self, name: str, url: str) -> None:
        self._name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.stream.load", name],
            env={**os.environ, "REDIS_URL": url, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def prepare(self, job: Job) -> None:
        """Returns when the job can begin at once."""
        self._tell(msgspec.json.encode(job))
        self._answer()

    def go(self) -> None:
        self._tell(b"go")

    def result(self) -> Span:
        """Waits for the end of the job."""
        return msgspec.json.decode(self._answer(), type=Span)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchError(f"{self._name} ended with status {self._process.wait()}, expected an answer")
        return line

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(name: str) -> None:
    """Runs the jobs that come on standard input, one a line, until that ends."""
    url = os.environ["REDIS_URL"]

    def ready() -> None:
        print("ready", flush=True)
        sys.stdin.readline()

    for line in iter(sys.stdin.readline, ""):
        job = msgspec.json.decode(line, type=Job)
        span = asyncio.run(_append(job, url, name, ready)) if isinstance(job, Append) else _send(job, ready)
        print(msgspec.json.encode(span).decode(), flush=True)


async def _append(job: Append, url: str, name: str, ready: Ready) -> Span:
    keys, group, count = Keys(job.run), group_of(job.group_bytes), job.groups_per_writer
    ends = [ProducerEnd(url, keys, f"{name}-{n}", count) for n in range(job.num_writers)]
    for end in ends:
        await end.claim(count)
    ready()
    spans = await asyncio.gather(*(end.append_in_bursts(group, job.burst) for end in ends))
    for end in ends:
        await end.close()
    return min(began for began, _ in spans), max(ended for _, ended in spans)


def _send(job: Send, ready: Ready) -> Span:
    message = b"x" * job.message_bytes
    ready()
    with socket.create_connection(("127.0.0.1", job.port)) as connection:
        began = time.monotonic()
        for _ in range(job.num_messages):
            connection.sendall(message)
        return began, time.monotonic()


if __name__ == "__main__":
    main(sys.argv[1])
