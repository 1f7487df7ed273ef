"""Producers in a test's own loop that end as a crash ends them, and claims that are free at once."""

import asyncio

from penstock.producers.stream.claims import FREE_AT_ONCE_MS
from penstock.schemas.keys import PRODUCERS_GROUP
from producer_run import KEYS


def free_claims(one) -> None:
    """Others may take over what a producer holds, as after `claim_idle_s` without a refresh."""
    client, whose = one.server.client, one.producer.context.producer_id
    rows = client.xpending_range(KEYS.prompts, PRODUCERS_GROUP, "-", "+", 9, whose)
    ids = [row["message_id"] for row in rows]
    if ids:
        client.xclaim(KEYS.prompts, PRODUCERS_GROUP, whose, 0, ids, idle=FREE_AT_ONCE_MS, justid=True)


async def kill(one) -> None:
    """Ends a producer as a crash does, a while ago: its claims and its heartbeat stay."""
    async with one.producer.table.marking:  # no refresh is on its way
        one.task.cancel()
        await asyncio.gather(one.task, return_exceptions=True)
    free_claims(one)
