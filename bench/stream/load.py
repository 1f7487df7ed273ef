"""What loads the stream from outside the measuring process, in processes of their own."""

import asyncio
import socket
import time

import msgspec

from bench.stream.ends import ProducerEnd, Span, group_of, plain_client
from penstock.schemas.keys import Keys

READY, GO = "bench:ready", "bench:go"
"""Redis lists: an entry for each process that has claimed, and one for each that may begin."""
GO_S = 60


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """Producers' writers side by side, with a connection each, that encode and append a group for each claim.

    burst: groups that one of them gets at a time.
    """

    url: str
    run: str
    name: str
    num_writers: int
    groups_per_writer: int
    burst: int
    group_bytes: int


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Sends the same bytes again and again over TCP."""

    port: int
    message_bytes: int
    num_messages: int


async def append(job: Append) -> Span:
    keys, group, count = Keys(job.run), group_of(job.group_bytes), job.groups_per_writer
    ends = [ProducerEnd(job.url, keys, f"{job.name}-{n}", count) for n in range(job.num_writers)]
    for end in ends:
        await end.claim(count)
    with plain_client(job.url) as client:
        client.rpush(READY, job.name)
        if client.blpop([GO], timeout=GO_S) is None:
            raise TimeoutError(f"{job.name}: nobody has said go for {GO_S} s")
    spans = await asyncio.gather(*(end.append_in_bursts(group, job.burst) for end in ends))
    for end in ends:
        await end.close()
    return min(began for began, _ in spans), max(ended for _, ended in spans)


def send(job: Send) -> Span:
    message = b"x" * job.message_bytes
    with socket.create_connection(("127.0.0.1", job.port)) as connection:
        began = time.monotonic()
        for _ in range(job.num_messages):
            connection.sendall(message)
        return began, time.monotonic()
