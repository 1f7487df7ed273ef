"""Processes that put load on the stream from outside the measuring one: `python -m bench.stream.load NAME`.

A load process waits for jobs on Redis lists named after it. It prepares each, reports that it is ready, waits for the
signal to start, and answers with the span of time that the job took.
"""

import asyncio
import os
import socket
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench.pipeline.records import make_group
from bench.result import BenchError
from bench.section import ended_early
from bench.stream.ends import ProducerEnd, Span, group_of, plain_client
from bench.stream.peer import Form, PeerWriter, texts_of
from penstock.deploy.launch.child import Child
from penstock.schemas.keys import Keys
from penstock.schemas.rollout import RolloutGroup, pack_floats, pack_ids, unpack_floats, unpack_ids

ANSWER_S = 120.0
GROUPS_IN_FLIGHT = 32
"""A producer's, as in the demo."""


class Append(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Producers' writers side by side, with a connection each, that encode and append a group for each claim."""

    run: str
    num_writers: int
    groups_per_writer: int
    burst: int
    """Groups that one of them gets at a time."""
    group_bytes: int


class Produce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A producer that samples in no time: claims prompts, packs ready-made completions, appends."""

    run: str
    num_groups: int
    completion_tokens: int
    form: Form
    """The form of the completions: Python lists, as vLLM returns them, or arrays."""


class PeerWrite(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The peer's writer."""

    stream: str
    num_groups: int
    completion_tokens: int
    form: Form
    by_group: bool
    """A record holds a group, or one rollout."""


class Send(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sends the same bytes again and again over TCP."""

    port: int
    message_bytes: int
    num_messages: int


Job = Append | Produce | PeerWrite | Send
Ready = Callable[[], None]
"""Reports that everything is prepared; returns at the signal to start."""


class LoadProcess:
    """The measuring process's handle of a load process."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        self._name = name
        self._client = plain_client(url)
        command = [sys.executable, "-m", "bench.stream.load", name]
        environment = {"REDIS_URL": url, "OMP_NUM_THREADS": "1"}
        self._child = Child(name, command, log=folder / f"{name}.log", environment=environment)

    def prepare(self, job: Job) -> None:
        """Returns when the job can begin at once."""
        self._client.rpush(_list(self._name, "job"), msgspec.json.encode(job))
        self._wait("ready")

    def go(self) -> None:
        self._client.rpush(_list(self._name, "go"), b"")

    def result(self) -> Span:
        """Waits for the end of the job."""
        return msgspec.json.decode(self._wait("done"), type=Span)

    def _wait(self, what: str) -> bytes:
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            answer: Any = self._client.blpop([_list(self._name, what)], timeout=1)
            if answer is not None:
                return answer[1]
            if self._child.poll() is not None:
                raise ended_early(self._child)
        raise BenchError(f"{self._name}: no answer in {ANSWER_S:g} s; its log ends:\n{self._child.last_lines()}")

    def end(self) -> None:
        self._client.close()
        self._child.end()


def _list(name: str, what: str) -> str:
    return f"bench:{name}:{what}"


def main(name: str) -> None:
    """Runs jobs until it is terminated."""
    url = os.environ["REDIS_URL"]
    client = plain_client(url)

    def ready() -> None:
        client.rpush(_list(name, "ready"), b"")
        while client.blpop([_list(name, "go")], timeout=1) is None:
            pass

    while True:
        message: Any = client.blpop([_list(name, "job")], timeout=1)
        if message is not None:
            span = _run(msgspec.json.decode(message[1], type=Job), url, name, ready)
            client.rpush(_list(name, "done"), msgspec.json.encode(span))


def _run(job: Job, url: str, name: str, ready: Ready) -> Span:
    if isinstance(job, Append):
        return asyncio.run(_append(job, url, name, ready))
    if isinstance(job, Produce):
        return asyncio.run(_produce(job, url, name, ready))
    if isinstance(job, PeerWrite):
        return _peer_write(job, url, ready)
    return _send(job, ready)


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


async def _produce(job: Produce, url: str, name: str, ready: Ready) -> Span:
    end = ProducerEnd(url, Keys(job.run), name, GROUPS_IN_FLIGHT)
    make = group_maker(make_group(completion_tokens=job.completion_tokens), job.form)
    await end.claims.open()
    ready()
    began = time.monotonic()

    async def produce() -> None:
        num_made = 0
        while num_made < job.num_groups:
            await end.table.wait_for_room()
            for claim in await end.claims.take():
                end.writer.put(claim, make(claim.index))
                num_made += 1
        await end.writer.drain()

    await end.until_done(produce())
    ended = time.monotonic()
    await end.close()
    return began, ended


def group_maker(group: RolloutGroup, form: Form) -> Callable[[int], RolloutGroup]:
    """Makes groups of completions whose numbers come in `form`; they are packed each time."""
    handed_over: list[tuple[Any, Any]] = []
    for rollout in group.rollouts:
        ids, logprobs = (
            unpack_ids(rollout.segments[0].token_ids),
            unpack_floats(rollout.segments[0].behavior_logprobs),
        )
        handed_over.append((list(ids), list(logprobs)) if form == "lists" else (ids, logprobs))
    replace = msgspec.structs.replace

    def make(index: int) -> RolloutGroup:
        rollouts = []
        for rollout, (ids, logprobs) in zip(group.rollouts, handed_over, strict=True):
            packed = {"token_ids": _packed(ids, pack_ids), "behavior_logprobs": _packed(logprobs, pack_floats)}
            rollouts.append(replace(rollout, segments=(replace(rollout.segments[0], **packed),)))
        return replace(group, index=index, rollouts=tuple(rollouts))

    return make


def _packed(numbers: Any, pack: Callable[[Any], bytes]) -> bytes:
    return numbers.tobytes() if isinstance(numbers, array) else pack(numbers)


def _peer_write(job: PeerWrite, url: str, ready: Ready) -> Span:
    with plain_client(url) as client:
        texts = texts_of(make_group(completion_tokens=job.completion_tokens), job.form)
        writer = PeerWriter(client, job.stream)
        client.ping()
        ready()
        began = time.monotonic()
        for _ in range(job.num_groups):
            for record in [texts] if job.by_group else texts:
                writer.write(record)
        return began, time.monotonic()


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
