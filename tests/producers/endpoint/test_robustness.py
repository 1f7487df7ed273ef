"""Two hundred agents at once, of whom many hang up, some die, and none leaves anything behind."""

import asyncio
import gc
import random
import time
from collections import Counter

import pytest

from agent_client import ADD, AgentClient, as_plain_client, tool_user
from penstock.producers.endpoint.call_ledger import Call
from penstock.producers.endpoint.groups import AgentRollout
from penstock.schemas.config import EndpointConfig, ProducersConfig, SamplingConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Kind
from penstock.schemas.rollout import decode_group
from producer_run import KEYS
from scripted_engine import ScriptedEngine
from waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_AGENTS, NUM_TURNS, GROUP_SIZE = 200, 5, 4
IDLE_S = 1300.0
SETTLED_S = 300.0


def num_alive() -> int:
    """Rollouts and calls that something still holds."""
    gc.collect()
    return sum(type(thing) in (AgentRollout, Call) for thing in gc.get_objects())


def no_agent_is_left(one) -> bool:
    """Those that died are found dead once their time is over, which on a busy machine must not be soon."""
    one.producer.endpoint.agents.end_overdue(time.monotonic() + IDLE_S + 1)
    return one.count("penstock_agent_rollouts_open") == 0


async def hang_up_or_chat(one, rollout: dict, messages: list[dict], chance: random.Random, took: list[float]) -> dict:
    """An answer; before it, one time in seven, a call whose answer nobody waits for, or looks at.

    took: seconds that answers took; clients hang up within the time of the last one, whatever the machine does
    meanwhile.
    """
    if chance.random() < 1 / 7:
        hasty = AgentClient(one.url)
        call = asyncio.create_task(hasty.chat(rollout, messages, tools=[ADD]))
        if chance.random() < 0.9:
            await asyncio.sleep(chance.random() * took[-1])
            call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await hasty.close()
    began = time.monotonic()
    answer = await one.client.chat(rollout, messages, tools=[ADD])
    took.append(time.monotonic() - began)
    return answer


async def agent(one, seed: int, ends: Counter[str], took: list[float]) -> None:
    """A conversation of NUM_TURNS turns; one agent in ten dies in the middle of it."""
    chance = random.Random(seed)
    rollout = await one.client.open(timeout_s=SETTLED_S)
    dies_at = chance.randrange(1, NUM_TURNS) if chance.random() < 0.1 else None
    messages: list[dict] = [{"role": "user", "content": f"task {rollout['index']}"}]
    for turn in range(NUM_TURNS):
        if turn == dies_at:
            ends["died"] += 1
            return
        reply = await hang_up_or_chat(one, rollout, messages, chance, took)
        ends["answers"] += 1
        messages.append(reply if chance.random() < 0.5 else as_plain_client(reply))
        calls = reply.get("tool_calls")
        follow_up = (
            {"role": "tool", "tool_call_id": "x", "content": "7"} if calls else {"role": "user", "content": "on"}
        )
        messages.append(follow_up)
    await one.client.finish(rollout, float(seed % 2))
    ends["finished"] += 1


async def wave(one, first_index: int, ends: Counter[str]) -> None:
    """All agents at once, on released indexes from `first_index` on, until every index is settled."""
    num_groups = NUM_AGENTS // GROUP_SIZE
    one.trainer.release(first_index, first_index + num_groups - 1)
    took = [0.02]
    async with asyncio.TaskGroup() as agents:
        for n in range(NUM_AGENTS):
            agents.create_task(agent(one, first_index + n, ends, took))
    await until(lambda: no_agent_is_left(one), SETTLED_S)
    entries = await one.entries(num_groups)
    assert sorted(int(fields[Field.INDEX]) for fields in entries) == list(range(first_index, first_index + num_groups))
    for fields in entries:
        if fields[Field.KIND] == Kind.DEAD:  # one group in ten thousand loses all its agents
            assert f"no rollout of {GROUP_SIZE} finished".encode() in fields[Field.REASON]
            continue
        for rollout in decode_group(fields[Field.PAYLOAD]).rollouts:
            ends["delivered"] += 1
            # An answer that had gone out when its client hung up was asked for again, and is trained once.
            (conversation,) = rollout.segments
            assert len(conversation.loss_mask) == NUM_TURNS


async def test_two_hundred_conversations_with_agents_that_hang_up_leave_nothing_behind(serve) -> None:
    one = await serve(
        ScriptedEngine(script=tool_user(), token_s=0.0001, max_model_len=8192),
        group_size=GROUP_SIZE,
        producers=ProducersConfig(groups_in_flight=NUM_AGENTS // GROUP_SIZE, claim_idle_s=30.0),
        sampling=SamplingConfig(max_tokens=200),
        endpoint=EndpointConfig(port=0, idle_timeout_s=IDLE_S, group_deadline_s=3600.0),
    )
    ends: Counter[str] = Counter()
    before = num_alive()
    for first_index in (100, 300):
        await wave(one, first_index, ends)
        await until(lambda: one.server.client.xlen(KEYS.prompts) == 0 and not one.producer.table, SETTLED_S)
        await until(lambda: num_alive() <= before, SETTLED_S)
    assert ends["finished"] + ends["died"] == 2 * NUM_AGENTS and ends["delivered"] == ends["finished"]
    assert one.engine.num_active == 0 and one.engine.cancelled
    assert len(one.engine.requests) - len(one.engine.cancelled) > ends["answers"]  # some had gone out unread
    assert one.server.client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"] == 0
    assert one.count("penstock_agent_rollouts_open") == 0
    assert one.count("penstock_agent_rollouts_total", outcome="dead") == ends["died"]
