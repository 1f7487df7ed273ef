"""Claims on a real server: first come, shared, kept alive, found again, taken over and handed back."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from redis import exceptions

from penstock.producers.stream.claims import FREE_AT_ONCE_MS
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field
from pipelines import lose_answers
from producer_desk import ProducerDesk
from producer_run import KEYS
from waiting import until

IDLE_S = 0.15
"""Claims are idle when a test lets them be: see `let_idle`."""


@pytest.fixture
def opened(desk) -> Callable[..., Awaitable[ProducerDesk]]:
    return lambda producer_id="a": desk(producer_id, group_size=4, claim_idle_s=IDLE_S).opened()


async def live_through_an_outage(connection: ProducerConnection) -> None:
    errors = [exceptions.ConnectionError("refused")]

    async def command() -> None:
        if errors:
            raise errors.pop()

    await connection.retrying(command)
    assert connection.num_recoveries == 1


def evaluate(client, last: int) -> None:
    for n in range(1, last + 1):
        client.xadd(KEYS.evaluations, {"n": n}, id=f"3-{n}")


def indexes(claims: list[Claim]) -> list[int]:
    return [claim.index for claim in claims]


def pending(client, stream: str = KEYS.prompts) -> dict[bytes, tuple[str, int]]:
    """(consumer, number of deliveries) by entry id."""
    rows = client.xpending_range(stream, PRODUCERS_GROUP, "-", "+", 100)
    return {row["message_id"]: (row["consumer"].decode(), row["times_delivered"]) for row in rows}


def let_idle(client) -> None:
    """As if nobody had refreshed any claim for long."""
    for stream in (KEYS.prompts, KEYS.evaluations):
        for row in client.xpending_range(stream, PRODUCERS_GROUP, "-", "+", 100):
            arguments = (stream, PRODUCERS_GROUP, row["consumer"], 0, [row["message_id"]])
            client.xclaim(*arguments, idle=10**9, justid=True)


def idle_ms(client) -> list[int]:
    rows = client.xpending_range(KEYS.prompts, PRODUCERS_GROUP, "-", "+", 100)
    return [row["time_since_delivered"] for row in rows]


async def test_evaluations_are_claimed_up_to_the_room_and_prompts_up_to_a_share_of_it(streams, opened) -> None:
    holder = await opened()
    holder.release(*range(1, 11))
    evaluate(streams.client, 12)
    claims = await holder.claims.take()
    assert [claim.evaluation_id for claim in claims[:12]] == [f"3-{n}" for n in range(1, 13)]
    assert indexes(claims[12:]) == [1, 2]
    assert {claim.version for claim in claims} == {3} and {claim.attempt for claim in claims} == {1}
    assert len(holder.table) == 14 and holder.table.sequences_free == 8 * 4 - 12 - 2 * 4


async def test_a_claim_whose_reply_was_lost_is_found_again_and_counts_as_one_attempt(streams, opened) -> None:
    holder = await opened()
    holder.release(1, 2, 3)
    lose_answers(streams.connection, [exceptions.ConnectionError("the reply is lost")])
    claims = await holder.claims.take()
    assert indexes(claims) == [1, 2]
    assert {claim.attempt for claim in claims} == {1}
    assert indexes(await holder.claims.take()) == [3]


async def test_an_idle_claim_is_taken_over_one_at_a_time_as_another_attempt(streams, opened) -> None:
    first, second = await opened("a"), await opened("b")
    first.release(1, 2)
    evaluate(streams.client, 1)
    await first.claims.take()
    assert await second.claims.take_over(KEYS.prompts) is None
    let_idle(streams.client)
    (claim,) = await second.claims.take()
    assert claim.evaluation_id == "3-1" and claim.attempt == 2
    (claim,) = await second.claims.take()
    assert claim.index == 1 and claim.attempt == 2
    assert sorted(pending(streams.client).values()) == [("a", 1), ("b", 2)]


async def test_a_refreshed_claim_is_not_taken_over_and_its_attempts_do_not_rise(streams, opened) -> None:
    first, second = await opened("a"), await opened("b")
    first.release(1)
    await first.claims.take()
    let_idle(streams.client)
    keeping = asyncio.create_task(first.claims.keep())
    await until(lambda: max(idle_ms(streams.client)) < 10**9)
    assert await second.claims.take_over(KEYS.prompts) is None
    assert list(pending(streams.client).values()) == [("a", 1)]
    keeping.cancel()


async def test_attempts_begin_to_count_anew_with_a_holder_that_went_on_for_long(streams, opened) -> None:
    first, second = await opened("a"), await opened("b")
    streams.client.xadd(KEYS.prompts, {Field.INDEX: 1, Field.VERSION: 0, Field.ATTEMPT: 2})
    first.release(2)
    proved, other = await first.claims.take()
    proved.has_proved = True
    keeping = asyncio.create_task(first.claims.keep())
    await until(lambda: sorted(pending(streams.client).values()) == [("a", 0), ("a", 1)])
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert (proved.attempt, other.attempt) == (3, 1)
    let_idle(streams.client)
    claims = {claim.index: claim.attempt for _ in range(2) for claim in await second.claims.take()}
    assert claims == {1: 3, 2: 2}, "what it was released with stays"
    for claim in second.table:
        claim.has_proved = True
    assert await second.claims.hand_back() == 2
    third = await opened("c")
    assert [claim.attempt for claim in await third.claims.take()] == [1, 1]


async def test_a_group_past_its_deadline_is_no_longer_kept(streams, opened) -> None:
    first, second = await opened("a"), await opened("b")
    first.release(1)
    (claim,) = await first.claims.take()
    claim.generating_since = time.monotonic() - ProducersConfig().generation_deadline_s - 1
    let_idle(streams.client)
    keeping = asyncio.create_task(first.claims.keep())
    await asyncio.sleep(0.3)
    taken_over = await second.claims.take_over(KEYS.prompts)
    assert taken_over is not None and taken_over.attempt == 2
    keeping.cancel()


async def test_after_a_reconnect_nothing_is_taken_over_for_one_idle_time(streams, opened, monkeypatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("penstock.producers.stream.claims.time", SimpleNamespace(monotonic=lambda: now[0]))
    first, second = await opened("a"), await opened("b")
    first.release(1)
    await first.claims.take()
    let_idle(streams.client)
    await live_through_an_outage(streams.connection)
    assert await second.claims.take() == []
    first.release(2)
    second.claims._more_waiting = True
    assert indexes(await second.claims.take()) == [2]
    now[0] += IDLE_S
    second.claims._more_waiting = True
    (claim,) = await second.claims.take()
    assert claim.index == 1 and claim.attempt == 2


async def test_what_is_handed_back_reaches_others_at_once_with_its_attempts(streams, opened) -> None:
    first, second = await opened("a"), await opened("b")
    first.release(1, 2)
    evaluate(streams.client, 1)
    for claim in await first.claims.take():
        claim.attempt, claim.has_begun = 3, claim.index == 2
    assert await first.claims.hand_back() == 3
    assert len(first.table) == 0 and streams.count(KEYS.prompts) == 2
    (evaluation,) = await second.claims.take()
    assert (evaluation.evaluation_id, evaluation.attempt) == ("3-1", 3)
    claims = await second.claims.take()
    assert indexes(claims) == [1, 2]
    assert {claim.attempt for claim in claims} == {3} and {claim.version for claim in claims} == {3}
    assert [claim.num_tries_lost for claim in claims] == [2, 3], "of the second, something was sampled"


async def test_a_conversation_that_is_handed_back_again_and_again_keeps_its_attempts(streams, opened) -> None:
    """Its entry stays, with the attempts that it was released with."""
    holders = [await opened(name) for name in "ab"]
    streams.client.xadd(KEYS.prompts, {Field.INDEX: 1, Field.VERSION: 0, Field.ATTEMPT: 1})
    for n in range(4):
        (claim,) = await (holders[n % 2].claims.take_lost() if n else holders[0].claims.take())
        assert claim.attempt == 2
        claim.converses = claim.has_progress = True
        assert await holders[n % 2].claims.hand_back() == 1


async def test_a_refresh_on_its_way_does_not_undo_a_hand_back(streams, opened, monkeypatch) -> None:
    """A conversation that can be gone on with is free at once, though its claim was just about to be refreshed."""
    holder = await opened()
    holder.release(1)
    (claim,) = await holder.claims.take()
    claim.converses = claim.has_progress = True
    refresh, on_its_way, sent, done = holder.claims.refresh, asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def late(by_stream: dict) -> None:
        on_its_way.set()
        await sent.wait()
        await refresh(by_stream)
        done.set()

    monkeypatch.setattr(holder.claims, "refresh", late)
    keeping = asyncio.create_task(holder.claims.keep())
    await on_its_way.wait()
    handing_back = asyncio.create_task(holder.claims.hand_back())
    await asyncio.wait({handing_back}, timeout=0.1)  # as far as it comes
    sent.set()
    await asyncio.gather(handing_back, done.wait())
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    rows = streams.client.xpending_range(KEYS.prompts, PRODUCERS_GROUP, "-", "+", 9, idle=FREE_AT_ONCE_MS // 2)
    assert [row["message_id"] for row in rows] == [claim.entry_id] and len(holder.table) == 0


async def test_a_prompt_whose_numbers_no_record_can_carry_is_removed_in_a_short_line(streams, opened, caplog) -> None:
    holder = await opened()
    for field, number in (("version", "9" * 5000), ("attempt", "9" * 30), ("index", "seven")):
        streams.client.xadd(KEYS.prompts, {"index": 1, "version": 0, field: number})
    holder.release(8)
    claims: list = []
    while not claims:
        claims = await holder.claims.take()
    assert indexes(claims) == [8] and streams.count(KEYS.prompts) == 1
    lines = [record.getMessage() for record in caplog.records if "names no task" in record.getMessage()]
    assert len(lines) == 3 and max(map(len, lines)) < 250 and "field version = b'9999" in lines[0]
