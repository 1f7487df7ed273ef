"""Connections that send no request, or half of one: they are timed out, bounded, and cost the producer nothing."""

import asyncio
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import aiohttp
import pytest

from agent_client import tool_user
from penstock.producers.endpoint import connections
from penstock.producers.endpoint.connections import RESERVE, raise_descriptor_limit
from scripted_engine import ScriptedEngine
from waiting import until

ASKED = [{"role": "user", "content": "what is three plus four"}]

pytestmark = pytest.mark.redis

ATTACKER = """
import resource, selectors, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
address, selector = ("127.0.0.1", int(sys.argv[1])), selectors.DefaultSelector()
held, num_made = set(), 0
selector.register(sys.stdin, selectors.EVENT_READ)
while True:
    while len(held) < 400:
        try:
            one = socket.create_connection(address, 0.1, ("127.0.0.2", 0))
            one.send(b"POST /r HTTP/1.1\\r\\nHost")
        except OSError:
            break  # the server's queue is full
        selector.register(one, selectors.EVENT_READ)
        held.add(one)
        num_made += 1
        if num_made % 400 == 0:
            print(num_made, flush=True)
    for key, _ in selector.select(0.1):
        if key.fileobj is sys.stdin:
            sys.exit()
        selector.unregister(key.fileobj)
        key.fileobj.close()
        held.discard(key.fileobj)
"""
"""Holds 400 connections of one peer with half a request each, opens new ones for those that are closed, and tells how
many it has opened, until its standard input ends."""


def num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@pytest.fixture
def few_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process may open no more than this many files; room for 100 connections and the reserve."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = num_descriptors() + 64 + RESERVE + 100
    monkeypatch.setattr(connections, "MOST_DESCRIPTORS", most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_half_open_connections_by_the_hundred_stall_neither_agents_nor_weights(
    few_descriptors: int, serve, caplog
) -> None:
    one = await serve(group_size=2)
    one.trainer.release(1, 1)
    port = one.url.rpartition(":")[2]
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ATTACKER, port, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert attacker.stdout is not None
    try:
        with caplog.at_level(logging.INFO):
            for version in (1, 2, 3):
                await attacker.stdout.readline()  # 400 more connections
                assert num_descriptors() <= few_descriptors - RESERVE // 2
                one.trainer.announce(version)
                await until(lambda version=version: one.engine.policy_version == version)
            for reward in (0.0, 1.0):
                rollout = await one.client.open()
                await one.client.converse(rollout)
                await one.client.finish(rollout, reward)
        (group,) = await one.groups(1)
        assert len(group.rollouts) == 2 and attacker.returncode is None
        told = [record for record in caplog.records if "too many connections" in record.getMessage()]
        assert len(told) == 1 and len(caplog.text) < 20_000
        assert "out of system resource" not in caplog.text and "Too many open files" not in caplog.text
    finally:
        await attacker.communicate(b"")  # which ends it


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What is received until the other side closes."""
    return await asyncio.wait_for(reader.read(), 60)


async def test_a_request_that_does_not_come_to_its_end_is_timed_out(serve, monkeypatch) -> None:
    monkeypatch.setattr("penstock.producers.endpoint.server.REQUEST_S", 0.3)
    monkeypatch.setattr("penstock.producers.endpoint.server.LINGER_S", 0.1)
    one = await serve()
    host, _, port = one.url.removeprefix("http://").partition(":")
    head = b"POST /r HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
    for sent, answer in (
        (b"", b""),
        (head, b""),
        (head + b"\r\n{", b"the body was not complete 0.3 s after the headers"),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        if answer:
            received = await asyncio.wait_for(reader.readuntil(answer), 60)
            assert received.startswith(b"HTTP/1.1 408") and b"request_timeout" in await closed(reader)
        else:
            assert await closed(reader) == b""
        writer.close()


async def test_connections_that_are_being_answered_stay_and_only_more_of_their_peer_are_refused(
    few_descriptors: int, serve, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(connections, "RECOUNT_S", 0.0)
    one = await serve(ScriptedEngine(script=tool_user(), token_s=60.0, max_model_len=4096))
    one.trainer.release(1, 1)
    rollout = await one.client.open()

    async def begin() -> asyncio.Task:
        num_active = one.engine.num_active
        call = asyncio.create_task(one.client.chat(rollout, ASKED))
        await until(lambda: call.done() or one.engine.num_active > num_active)
        return call

    calls = [await begin()]
    while not calls[-1].done():
        calls.append(await begin())
    with pytest.raises(aiohttp.ClientError):
        calls.pop().result()
    assert 20 < len(calls) < 100 and not any(call.done() for call in calls)
    assert "connections of 127.0.0.1 are refused" in caplog.text
    host, _, port = one.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
    writer.write(f"GET /r/{rollout['id']}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200")
    writer.close()
    calls[0].cancel()
    await until(lambda: one.engine.num_active == len(calls) - 1)
    calls.append(await begin())
    assert not calls[-1].done()
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def test_the_soft_limit_of_open_files_is_raised_as_far_as_the_hard_one_allows(monkeypatch) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = num_descriptors() + 64
    try:
        for most, expected in ((low + 10, low + 10), (1 << 40, before[1]), (low - 10, low)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
            monkeypatch.setattr(connections, "MOST_DESCRIPTORS", most)
            raise_descriptor_limit()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
