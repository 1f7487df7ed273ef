"""Both ends of the stream on their own: a producer's claims and writer, a trainer's reader, ledger and commit."""

import asyncio
import time
from typing import Any

import msgspec
import redis

from bench.result import BenchError
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


async def append_groups(url: str, keys: Keys, group: RolloutGroup, num_groups: int) -> Span:
    """Claims prompts, released before, as a producer without an engine; encodes and appends a copy of `group` for each,
    all that wait together. Returns when that began and when the server had answered to the last."""
    metrics = ProducerMetrics()
    connection = ProducerConnection.open(url, outage_s=OUTAGE_S, metrics=metrics)
    table = InFlightTable(num_groups=num_groups, group_size=GROUP_SIZE)
    claims = Claims(connection, keys, "producer-0", table, ProducersConfig())
    writer = Writer(connection, keys, table, metrics, "bench", "producer-0")
    try:
        await claims.open()
        while len(table) < num_groups:
            await claims.take()
        began = time.monotonic()
        for claim in table:
            writer.put(claim, msgspec.structs.replace(group, index=claim.index))
        writing, draining = asyncio.create_task(writer.run()), asyncio.create_task(writer.drain())
        await asyncio.wait({writing, draining}, return_when=asyncio.FIRST_COMPLETED)
        for task in (writing, draining):
            if task.done():
                task.result()  # an error of the writer's
            task.cancel()
        return began, time.monotonic()
    finally:
        await connection.close()


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


def read_bare(client: "redis.Redis", keys: Keys) -> int:
    """Reads all entries and trims them; returns their number."""
    cursor, num_read = b"0-0", 0
    while reply := client.xread({keys.rollouts: cursor}, count=ENTRIES_PER_ROUND_TRIP):
        entries: Any = reply[0][1]
        cursor, num_read = entries[-1][0], num_read + len(entries)
    client.xtrim(keys.rollouts, maxlen=0, approximate=False)
    return num_read


class TrainerEnd:
    """A trainer's reader, ledger and commit script without a trainer."""

    def __init__(self, url: str, keys: Keys, num_released: int) -> None:
        self._connection = TrainerConnection(url, OUTAGE_S)
        self._ledger = Ledger()
        self._ledger.num_released = num_released
        # The versions that `make_group` labels its tokens with are all announced.
        self._lag_of = LagTable(2000, {}, {})
        self._reader = Reader(
            self._connection, keys, self._ledger, GROUP_SIZE, lambda group: check_trainable(group, VOCABULARY)
        )
        self._scripts = Scripts(self._connection, keys)
        self._scripts.open_epoch(0)
        self.num_read = 0

    def read(self) -> None:
        """Reads once and settles what came, as a trainer that trains at once would."""
        self.num_read += self._reader.read(self._lag_of, block=False)
        if self._reader.take_refused():
            raise BenchError("the reader refuses what the benchmark has appended")
        for index in self._reader.ready:
            self._ledger.settle(index, "trained")
        self._reader.ready.clear()

    def acknowledge(self) -> int:
        """Commits, the protocol's only acknowledgement, which trims the stream. Returns the entries trimmed."""
        return self._scripts.commit("bench", self._reader.first_unsettled())

    def close(self) -> None:
        self._connection.close()
