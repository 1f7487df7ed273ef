"""A hundred agents at once, of whom many hang up, some die, and none leaves anything behind."""

import asyncio
import gc
import random
import time

import pytest

from agent_client import ADD, AgentClient, as_plain_client, tool_user
from penstock.producers.endpoint.call_ledger import Call
from penstock.producers.endpoint.groups import AgentRollout
from penstock.schemas.config import EndpointConfig, ProducersConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Kind
from penstock.schemas.rollout import decode_group
from producer_run import KEYS
from scripted_engine import ScriptedEngine
from waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_AGENTS, NUM_TURNS, GROUP_SIZE, IDLE_S = 100, 5, 4, 1300.0


def num_alive() -> int:
    """Rollouts and calls that something still holds."""
    gc.collect()
    return sum(type(thing) in (AgentRollout, Call) for thing in gc.get_objects())


async def agent(one, seed: int) -> bool:
    """A conversation of NUM_TURNS turns, in which one call in seven is hung up on, at any moment, and sent again.
    Returns False for the one agent in ten that dies in the middle."""
    chance = random.Random(seed)
    rollout = await one.client.open(timeout_s=300.0)
    dies_at = chance.randrange(1, NUM_TURNS) if chance.random() < 0.1 else None
    messages: list[dict] = [{"role": "user", "content": f"task {rollout['index']}"}]
    for turn in range(NUM_TURNS):
        if turn == dies_at:
            return False
        if chance.random() < 1 / 7:
            hasty = AgentClient(one.url)
            call = asyncio.create_task(hasty.chat(rollout, messages, tools=[ADD]))
            await asyncio.sleep(chance.random() * 0.02)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await hasty.close()
        reply = await one.client.chat(rollout, messages, tools=[ADD])
        messages.append(reply if chance.random() < 0.5 else as_plain_client(reply))
        called = reply.get("tool_calls")
        more = {"role": "tool", "tool_call_id": "x", "content": "7"} if called else {"role": "user", "content": "on"}
        messages.append(more)
    await one.client.finish(rollout, float(seed % 2))
    return True


async def test_conversations_with_agents_that_hang_up_and_die_leave_nothing_behind(serve) -> None:
    one = await serve(
        ScriptedEngine(script=tool_user(), token_s=0.0001, max_model_len=8192),
        group_size=GROUP_SIZE,
        producers=ProducersConfig(groups_in_flight=NUM_AGENTS // GROUP_SIZE, claim_idle_s=30.0),
        endpoint=EndpointConfig(port=0, idle_timeout_s=IDLE_S, group_deadline_s=3600.0),
    )
    before, num_groups = num_alive(), NUM_AGENTS // GROUP_SIZE

    def no_agent_is_left() -> bool:
        one.producer.endpoint.agents.end_overdue(time.monotonic() + IDLE_S + 1)
        return one.count("penstock_agent_rollouts_open") == 0

    one.trainer.release(101, 100 + num_groups)
    finished = await asyncio.gather(*(agent(one, seed) for seed in range(NUM_AGENTS)))
    await until(no_agent_is_left, 300.0)
    entries = await one.entries(num_groups)
    assert sorted(int(fields[Field.INDEX]) for fields in entries) == list(range(101, 101 + num_groups))
    groups = [decode_group(fields[Field.PAYLOAD]) for fields in entries if fields[Field.KIND] == Kind.GROUP]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == sum(finished) < NUM_AGENTS
    for rollout in rollouts:
        # An answer that had gone out when its client hung up was asked for again, and is trained once.
        (conversation,) = rollout.segments
        assert len(conversation.loss_mask) == NUM_TURNS
    del groups, rollouts
    await until(lambda: one.server.client.xlen(KEYS.prompts) == 0 and not one.producer.table, 300.0)
    await until(lambda: num_alive() <= before, 300.0)
    assert one.engine.num_active == 0
    assert one.server.client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"] == 0
    assert one.count("penstock_agent_rollouts_total", outcome="dead") == finished.count(False)
