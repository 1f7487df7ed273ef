"""The sign of life, and who may use a producer's name."""

import asyncio
import os
import socket
import sys
import time

import pytest

from penstock.producers.stream import heartbeat as module
from penstock.producers.stream.heartbeat import HeartbeatSender, check_id_is_free
from penstock.schemas.heartbeat import HEARTBEAT_TTL_S, Heartbeat, decode_heartbeat, encode_heartbeat
from penstock.schemas.keys import Commit, Keys
from waiting import until
from wire_examples import heartbeat

KEYS = Keys("test")
KEY = KEYS.producer("a")


def described(**changes) -> Heartbeat:
    return heartbeat("a", **{"host": "elsewhere", "pid": 17, "policy_version": 3, "sent_s": time.time(), **changes})


async def test_a_heartbeat_expires_and_carries_what_is_described(streams) -> None:
    sender = HeartbeatSender(streams.connection, KEYS, "a", described, lambda: None)
    await sender.claim_id()
    assert 0 < streams.client.ttl(KEY) <= HEARTBEAT_TTL_S
    assert decode_heartbeat(streams.client.get(KEY)).policy_version == 3
    await sender.stop()
    assert streams.client.get(KEY) is None


async def test_a_finished_run_is_heard_with_the_heartbeat_by_its_own_epochs_when_it_is_begun_anew(streams) -> None:
    finished = asyncio.Event()
    streams.client.hset(KEYS.commit, mapping={Commit.EPOCH: 3, Commit.RUN_ID: "one"})
    sender = HeartbeatSender(streams.connection, KEYS, "a", described, finished.set)
    running = asyncio.create_task(sender.run())
    await until(lambda: streams.client.exists(KEY))
    assert not finished.is_set()
    streams.client.hset(KEYS.commit, mapping={Commit.EPOCH: 0, Commit.RUN_ID: "two", Commit.FINISHED: b"1"})
    await asyncio.wait_for(finished.wait(), 60)
    running.cancel()


@pytest.mark.parametrize(("ahead_s", "said"), [(600, "600 s ahead of"), (-300, "300 s behind"), (1, None)])
async def test_a_host_whose_clock_is_wrong_is_told_once(streams, monkeypatch, caplog, ahead_s, said) -> None:
    seconds, microseconds = streams.client.time()
    began_s, right_s = time.monotonic(), seconds + microseconds / 1e6
    monkeypatch.setattr(module.time, "time", lambda: right_s + time.monotonic() - began_s + ahead_s)
    sender = HeartbeatSender(streams.connection, KEYS, "a", described, lambda: None)
    assert sender.clock_ahead_s is None
    running = asyncio.create_task(sender.run())
    await until(lambda: sender.clock_ahead_s is not None)
    await asyncio.sleep(0.3)
    running.cancel()
    assert sender.clock_ahead_s == pytest.approx(ahead_s, abs=3.0)
    told = [record.getMessage() for record in caplog.records if "clock" in record.getMessage()]
    assert [said in each for each in told] == ([True] if said else [])


async def test_what_no_live_process_renews_does_not_take_the_id(streams) -> None:
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    await ended.wait()
    here = socket.gethostname()
    for left in (
        encode_heartbeat(described(host=here, pid=ended.pid)),
        encode_heartbeat(described(host=here, pid=os.getpid())),  # a restarted container is not its own rival
        b"something",
    ):
        streams.client.set(KEY, left)
        assert await asyncio.wait_for(check_id_is_free(streams.connection, KEYS, "a"), 60) == left


async def test_a_heartbeat_that_is_not_renewed_is_waited_out(streams, caplog) -> None:
    caplog.set_level("INFO")
    streams.client.set(KEY, encode_heartbeat(described()))
    checking = asyncio.create_task(check_id_is_free(streams.connection, KEYS, "a"))
    await until(lambda: "waiting to see whether it is alive" in caplog.text)
    await asyncio.sleep(0.2)
    assert not checking.done()
    streams.client.pexpire(KEY, 1)
    await asyncio.wait_for(checking, 60)


@pytest.mark.redis
async def test_a_server_at_its_memory_limit_does_not_end_the_heartbeat(redis_server, connect) -> None:
    server = redis_server()
    sender = HeartbeatSender(connect(server), KEYS, "a", described, lambda: None)
    server.client.config_set("maxmemory", 1)
    running = asyncio.create_task(sender.run())
    await asyncio.sleep(0.2)
    assert not running.done() and server.client.get(KEY) is None
    server.client.config_set("maxmemory", 0)
    await until(lambda: server.client.get(KEY) is not None)
    running.cancel()
