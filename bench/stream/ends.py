"""Both ends of the stream on their own: a producer's claims and writer, a trainer's reader, ledger and commit."""

import asyncio
import time
from typing import Any

import msgspec
import redis

from bench.stream.records import GROUP_SIZE, make_group
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.reader import Reader
from penstock.consumers.stream.scripts import Scripts
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.claims import Claims
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import InFlightTable
from penstock.producers.stream.writer import Writer
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Keys, Kind
from penstock.schemas.rollout import RolloutGroup, encode_group

OUTAGE_S = 60.0
"""A server may stall for seconds while a busy disk takes its append-only file."""
BYTES_PER_TOKEN = 8 * GROUP_SIZE
"""Payload of one more token in every completion of a group."""
VOCABULARY = 50_000
ENTRIES_PER_ROUND_TRIP = 16

Span = tuple[float, float]
"""Monotonic seconds at which something began and ended; the clock is the same in every process."""


def plain_client(url: str) -> "redis.Redis":
    return redis.Redis.from_url(url, protocol=2, socket_timeout=OUTAGE_S)


def group_of(num_bytes: int) -> RolloutGroup:
    """Makes a group whose encoding has about `num_bytes`."""
    frame = len(encode_group(make_group(completion_tokens=4))) - 4 * BYTES_PER_TOKEN
    return make_group(completion_tokens=max(4, (num_bytes - frame) // BYTES_PER_TOKEN))


class ProducerEnd:
    """A producer's claims and writer without an engine: it claims prompts and appends ready-made groups."""

    def __init__(self, url: str, keys: Keys, producer_id: str, num_groups: int) -> None:
        metrics = ProducerMetrics()
        self.connection = ProducerConnection.open(url, outage_s=OUTAGE_S, metrics=metrics)
        self.table = InFlightTable(num_groups=num_groups, group_size=GROUP_SIZE)
        self.claims = Claims(self.connection, keys, producer_id, self.table, ProducersConfig())
        self.writer = Writer(self.connection, keys, self.table, metrics, "bench", producer_id)

    async def claim(self, num_groups: int) -> None:
        """Waits until `num_groups` prompts, released before, are claimed."""
        await self.claims.open()
        while len(self.table) < num_groups:
            await self.claims.take()

    async def append_in_bursts(self, group: RolloutGroup, burst: int) -> Span:
        """Encodes and appends a group for every claim, `burst` at a time, each when the one before is in Redis."""

        async def append() -> None:
            for n, claim in enumerate(self.table, 1):
                self.writer.put(claim, msgspec.structs.replace(group, index=claim.index))
                if n % burst == 0:
                    await self.writer.drain()
            await self.writer.drain()

        began = time.monotonic()
        await self.until_done(append())
        return began, time.monotonic()

    async def until_done(self, work: Any) -> None:
        """Keeps the writer running until `work` is done; an error of the writer's is raised here."""
        writing, working = asyncio.create_task(self.writer.run()), asyncio.ensure_future(work)
        await asyncio.wait({writing, working}, return_when=asyncio.FIRST_COMPLETED)
        for task in (writing, working):
            if task.done():
                task.result()
            task.cancel()

    async def close(self) -> None:
        await self.connection.close()


async def append_groups(url: str, keys: Keys, group: RolloutGroup, num_groups: int) -> Span:
    """Claims prompts, released before, and appends a copy of `group` for each, all that wait together."""
    end = ProducerEnd(url, keys, "producer-0", num_groups)
    try:
        await end.claim(num_groups)
        return await end.append_in_bursts(group, num_groups)
    finally:
        await end.close()


def release_prompts(client: "redis.Redis", keys: Keys, num_prompts: int) -> None:
    """Puts indexes 1 to `num_prompts` onto the prompts stream, as the release script does."""
    pipeline = client.pipeline(transaction=False)
    for index in range(1, num_prompts + 1):
        pipeline.xadd(keys.prompts, {Field.INDEX: index, Field.VERSION: 0})
    pipeline.xgroup_create(keys.prompts, PRODUCERS_GROUP, id="0")
    pipeline.execute()


def fill(client: "redis.Redis", keys: Keys, group: RolloutGroup, num_groups: int) -> int:
    """Appends copies of a group under indexes 1 to `num_groups`, with no prompts; returns their bytes of payload."""
    total = 0
    for start in range(1, num_groups + 1, ENTRIES_PER_ROUND_TRIP):
        pipeline = client.pipeline(transaction=False)
        for index in range(start, min(start + ENTRIES_PER_ROUND_TRIP, num_groups + 1)):
            payload = encode_group(msgspec.structs.replace(group, index=index))
            pipeline.xadd(keys.rollouts, {Field.INDEX: index, Field.KIND: Kind.GROUP, Field.PAYLOAD: payload})
            total += len(payload)
        pipeline.execute()
    return total


class TrainerEnd:
    """A trainer's reader, ledger and commit script without a trainer."""

    def __init__(self, url: str, keys: Keys, num_released: int, *, decodes: bool = True) -> None:
        self._connection = TrainerConnection(url, OUTAGE_S)
        self._ledger = Ledger()
        self._ledger.num_released = num_released
        # The versions that `make_group` labels its tokens with are all announced.
        self._lag_of = LagTable(2000, {}, {})
        kind = Reader if decodes else _Undecoded
        self._reader = kind(
            self._connection, keys, self._ledger, GROUP_SIZE, lambda group: check_trainable(group, VOCABULARY)
        )
        self._scripts = Scripts(self._connection, keys)
        self._scripts.open_epoch(0)
        self.num_read = 0

    def read(self, *, block: bool) -> int:
        """Reads once and settles what came, as a trainer that trains at once would; returns the number of entries."""
        num_entries = self._reader.read(self._lag_of, block=block)
        if self._reader.take_refused():
            raise RuntimeError("the reader refuses what the benchmark has appended")
        for index in self._reader.ready:
            self._ledger.settle(index, "trained")
        self._reader.ready.clear()
        self.num_read += num_entries
        return num_entries

    def acknowledge(self) -> int:
        """Commits, the protocol's only acknowledgement, which trims the stream. Returns the entries trimmed."""
        return self._scripts.commit("bench", self._reader.first_unsettled(), b"0-0")

    def close(self) -> None:
        self._connection.close()


class _Undecoded(Reader):
    """Reads as the reader does and decodes nothing."""

    def _receive(self, entry_id: bytes, fields: dict[bytes, bytes], lag_of: Any) -> None:
        pass
