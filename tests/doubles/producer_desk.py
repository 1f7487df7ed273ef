"""A producer's table and what claims, writes and keeps progress for it, without the loop and the engine."""

import asyncio
from typing import Any

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.claims import Claims
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim, InFlightTable
from penstock.producers.stream.journals import JournalHolder, Journals
from penstock.producers.stream.progress_store import ProgressStore
from penstock.producers.stream.rollout_progress import RolloutProgress
from penstock.producers.stream.writer import Writer
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field
from producer_run import KEYS


class ProducerDesk:
    """settings: of the run file's section. client: a plain one of the same server."""

    def __init__(
        self,
        connection: ProducerConnection,
        client: Any,
        metrics: ProducerMetrics,
        producer_id: str = "a",
        *,
        instance: str = "i1",
        group_size: int = 1,
        **settings: Any,
    ) -> None:
        config = ProducersConfig(**{"groups_in_flight": 8, **settings})
        self.connection, self.client, self.metrics = connection, client, metrics
        self.table = InFlightTable(num_groups=config.groups_in_flight, group_size=group_size)
        self.claims = Claims(connection, KEYS, producer_id, self.table, config)
        self.writer = Writer(connection, KEYS, self.table, metrics, producer_id, instance)
        self.store = ProgressStore(connection, KEYS, self.table, metrics, config)
        self.progress = RolloutProgress(self.store, instance)
        self.journals = Journals(self.store, JournalHolder(instance, producer_id))

    async def opened(self) -> "ProducerDesk":
        await self.claims.open()
        return self

    def release(self, *indexes: int) -> None:
        for index in indexes:
            self.client.xadd(KEYS.prompts, {Field.INDEX: index, Field.VERSION: 3})

    async def claimed(self, num_prompts: int) -> list[Claim]:
        """Releases and claims so many prompts."""
        await self.opened()
        self.release(*range(1, num_prompts + 1))
        while len(self.table) < num_prompts:
            await self.claims.take()
        return list(self.table)

    async def written(self) -> None:
        """Runs the writer until Redis has all that was put."""
        running = asyncio.create_task(self.writer.run())
        await asyncio.wait_for(self.writer.drain(), 60)
        running.cancel()

    def num_open(self) -> tuple[int, int]:
        """Returns how many prompts are on the stream, and how many claims are pending."""
        return self.client.xlen(KEYS.prompts), self.client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"]
