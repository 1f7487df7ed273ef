"""The producer's heartbeat: its id, claims and token rate, under a key that expires."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import OutOfMemoryError

from penstock.producers.stream.connection import ProducerConnection
from penstock.schemas.heartbeat import HEARTBEAT_TTL_S, Heartbeat, decode_heartbeat, encode_heartbeat
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.process import clock
from penstock.schemas.producer_parity import ProducerParity, quarantine_in

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0


class ProducerIdTakenError(RuntimeError):
    """Another live producer of this run has the same id."""


async def check_id_is_free(connection: ProducerConnection, keys: Keys, producer_id: str) -> bytes | None:
    """Waits until it is certain that no live producer has this id; returns the heartbeat that a dead one left, or None.

    Two producers of one id would mistake each other's claims for their own lost replies, so the second does not start.
    It is not renamed: starting `producer-0` twice is a mistake that a suffix would hide. A heartbeat of a
    dead process does not count: that process was on this host, or does not renew it.

    Raises:
        ProducerIdTakenError: a heartbeat is being renewed under this id.
    """
    key = keys.producer(producer_id)
    seen: Heartbeat | None = None
    deadline = time.monotonic() + HEARTBEAT_TTL_S + HEARTBEAT_S
    while time.monotonic() < deadline:
        data: Any = await connection.retrying(lambda: connection.commands.get(key))
        if data is None:
            return None
        try:
            found = decode_heartbeat(data)
        except msgspec.DecodeError as error:
            log.warning("%s holds no heartbeat (%s): taken over", key, error)
            return data
        if _is_dead(found):
            return data
        if seen is not None and found.sent_s != seen.sent_s:
            break
        if seen is None:
            log.info("found a heartbeat of another %s: waiting to see whether it is alive", producer_id)
        seen = found
        await asyncio.sleep(HEARTBEAT_S / 4)
    assert seen is not None
    raise _taken(seen, keys, producer_id)


def _taken(by: Heartbeat, keys: Keys, producer_id: str) -> ProducerIdTakenError:
    return ProducerIdTakenError(
        f"producer id {producer_id!r}: process {by.pid} on {by.host} runs under it in run {keys.run!r}; "
        "stop that one or choose another --id"
    )


def _is_dead(heartbeat: Heartbeat) -> bool:
    """Returns True for a process of this host that has ended, or had this process id (a restarted container)."""
    if heartbeat.host != socket.gethostname():
        return False
    if heartbeat.pid == os.getpid():
        return True
    try:
        os.kill(heartbeat.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # alive, another user's
    return False


class HeartbeatSender:
    """Sends the heartbeat that `describe` returns every `HEARTBEAT_S`, and reads whether the run is finished and
    whether this producer is quarantined.

    If two producers start under one id at the same moment, or one was suspended for longer than a heartbeat lives, the
    one that finds the other's heartbeat in place of its own ends; the one that wrote last continues.
    """

    def __init__(
        self,
        connection: ProducerConnection,
        keys: Keys,
        producer_id: str,
        describe: Callable[[], Heartbeat],
        on_finished: Callable[[], None],
        on_quarantined: Callable[[ProducerParity], None] = lambda found: None,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._key = keys.producer(producer_id)
        self._producer_id = producer_id
        self._describe = describe
        self._on_finished = on_finished
        self._on_quarantined = on_quarantined
        self._left_by_another: bytes | None = None
        self._epoch = -1
        """The newest trainer epoch seen of run `_run_id`."""
        self._run_id = b""
        self.clock_ahead_s: float | None = None
        """Seconds by which this host's clock is ahead of Redis', at the last heartbeat; None before the first."""

    async def claim_id(self) -> None:
        """Sends the first heartbeat.

        Raises:
            ProducerIdTakenError: another process sends heartbeats under this id.
        """
        self._left_by_another = await check_id_is_free(self._connection, self._keys, self._producer_id)
        await self._send()

    async def run(self) -> None:
        """Waits `HEARTBEAT_S`, sends, and again; runs until cancelled.

        Raises:
            ProducerIdTakenError: another process sends heartbeats under this id.
        """
        while True:
            await self._send()
            await asyncio.sleep(HEARTBEAT_S)

    async def stop(self) -> None:
        """Deletes the heartbeat, which frees the id at once."""
        await self._connection.retrying(lambda: self._connection.commands.delete(self._key))

    async def _send(self) -> None:
        try:
            # A server at its memory limit refuses heartbeats too. The writer waits for it and logs it.
            finished = await self._connection.retrying(self._exchange, wait_at_memory_limit=False)
        except OutOfMemoryError:
            return
        if finished:
            self._on_finished()

    async def _exchange(self) -> bool:
        """Sends the heartbeat; returns whether the run is finished."""
        pipeline = self._connection.commands.pipeline(transaction=False)
        for field in (Commit.FINISHED, Commit.EPOCH, Commit.RUN_ID):
            pipeline.hget(self._keys.commit, field.decode())
        pipeline.get(self._key)
        own = self._describe()
        pipeline.hget(self._keys.parity, own.instance)
        pipeline.time()
        before_s = time.time()
        finished, epoch, run_id, held, parity, redis_time = await pipeline.execute()
        self._compare_clocks(clock.seconds_ahead(redis_time, before_s, time.time()))
        if (quarantine := quarantine_in(parity)) is not None:
            self._on_quarantined(quarantine)
        if held is not None and held != self._left_by_another:
            self._check_own(held, own)
        await self._connection.commands.set(self._key, encode_heartbeat(own), ex=HEARTBEAT_TTL_S)
        if run_id is not None and run_id != self._run_id:
            self._run_id, self._epoch = run_id, -1
        # In a Redis that fell back to an older state, an older epoch's flag is of a run that was continued since.
        is_newest, self._epoch = int(epoch or -1) >= self._epoch, max(int(epoch or -1), self._epoch)
        return finished == b"1" and is_newest

    def _compare_clocks(self, ahead_s: float) -> None:
        if self.clock_ahead_s is None or abs(ahead_s - self.clock_ahead_s) > clock.TOLERATED_S:
            clock.tell_if_wrong(ahead_s)
        self.clock_ahead_s = ahead_s

    def _check_own(self, held: bytes, own: Heartbeat) -> None:
        try:
            found = decode_heartbeat(held)
        except msgspec.DecodeError:
            return  # not a heartbeat: overwritten
        if (found.host, found.pid) != (own.host, own.pid):
            raise _taken(found, self._keys, self._producer_id)
