"""The producer's end of the stream on its own: claims and the writer, with no engine."""

import asyncio
import time
from typing import Any

import msgspec
import redis
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.claims import Claims
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import InFlightTable
from penstock.producers.stream.writer import Writer
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Keys
from penstock.schemas.rollout import RolloutGroup, encode_group

from bench.records import GROUP_SIZE, make_group

PATIENCE_S = 60.0
"""A server may stand still for seconds while a busy disk takes its append-only file."""
BYTES_PER_TOKEN = 8 * GROUP_SIZE
"""Of payload, for one more token in every completion of a group."""

Span = tuple[float, float]
"""Monotonic seconds at which something began and ended; the clock is the same in every process."""


def group_of(num_bytes: int) -> RolloutGroup:
    """A group whose encoding has about `num_bytes`."""
    frame = len(encode_group(make_group(completion_tokens=4))) - 4 * BYTES_PER_TOKEN
    return make_group(completion_tokens=max(4, (num_bytes - frame) // BYTES_PER_TOKEN))


class AppendDesk:
    """A producer's writer whose groups are sampled: its prompts are claimed, and what is left is to append them."""

    def __init__(self, url: str, keys: Keys, producer_id: str, num_groups: int) -> None:
        metrics = ProducerMetrics()
        self.connection = ProducerConnection.open(url, outage_s=PATIENCE_S, metrics=metrics)
        self.table = InFlightTable(num_groups=num_groups, group_size=GROUP_SIZE)
        self.claims = Claims(self.connection, keys, producer_id, self.table, ProducersConfig())
        self.writer = Writer(self.connection, keys, self.table, metrics)

    async def claim(self, num_groups: int) -> None:
        """Waits until `num_groups` prompts, released before, are claimed."""
        await self.claims.open()
        while len(self.table) < num_groups:
            await self.claims.take()

    def put(self, group: RolloutGroup) -> None:
        """Hands a group over for every claim; it is encoded here."""
        for claim in self.table:
            self.writer.put(claim, msgspec.structs.replace(group, index=claim.index))

    async def append(self) -> Span:
        """Appends what was put. The server's answer to the last of it ends it."""
        began = time.monotonic()
        await self.until_done(self.writer.drain())
        return began, time.monotonic()

    async def append_in_bursts(self, group: RolloutGroup, burst: int) -> Span:
        """Encodes and appends a group for every claim, `burst` at a time, each time when those before are in Redis."""

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


def release_prompts(client: "redis.Redis", keys: Keys, num_prompts: int) -> None:
    """Puts indexes 1 to `num_prompts` onto the prompts stream, as the release script does."""
    pipeline = client.pipeline(transaction=False)
    for index in range(1, num_prompts + 1):
        pipeline.xadd(keys.prompts, {Field.INDEX: index, Field.VERSION: 0})
    pipeline.xgroup_create(keys.prompts, PRODUCERS_GROUP, id="0")
    pipeline.execute()
