"""A teacher's server scores what agents have finished, on the way to the stream."""

import asyncio

import pytest
from msgspec.structs import replace

from penstock.producers.endpoint import agents
from penstock.producers.rollout.teacher import TeacherError
from penstock.schemas.keys import Field, Kind
from penstock.schemas.rollout import RolloutGroup, decode_group, pack_floats
from producer_run import KEYS
from waiting import until

pytestmark = pytest.mark.redis


def taught(group: RolloutGroup) -> RolloutGroup:
    rollouts = (
        replace(
            rollout,
            segments=tuple(
                replace(part, teacher_logprobs=pack_floats([-0.5] * part.num_sampled_tokens))
                for part in rollout.segments
            ),
        )
        for rollout in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))


async def finished(one, index: int = 1) -> None:
    """Agents finish the group of an index."""
    one.trainer.release(index, index)
    for rollout in [await one.client.open() for _ in range(2)]:
        await one.client.converse(rollout)
        await one.client.finish(rollout, 1.0)


async def test_a_group_goes_onto_the_stream_with_its_teachers_logprobs_or_is_dead_with_the_agents_work(serve) -> None:
    async def teacher(group: RolloutGroup) -> RolloutGroup:
        if group.index == 2:
            raise TeacherError("HTTP 400: too long")
        return taught(group)

    one = await serve(teacher=teacher, group_size=2)
    await finished(one)
    (group,) = await one.groups(1)
    assert group == taught(group) and group.index == 1
    assert one.count("penstock_agent_tokens_total") == one.count("penstock_agent_tokens_delivered_total") > 0
    await finished(one, index=2)
    (entry,) = await one.entries(1)
    assert (entry[Field.KIND], entry[Field.REASON]) == (Kind.DEAD, b"teacher: HTTP 400: too long")
    assert len(decode_group(entry[Field.PAYLOAD], dead=True).rollouts) == 2
    await until(lambda: not one.producer.table)


async def test_a_producer_that_stops_while_its_teacher_hangs_hands_the_prompt_back(serve, monkeypatch) -> None:
    async def teacher(group: RolloutGroup) -> RolloutGroup:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()
        return group

    asked, given_up = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr(agents, "TEACHER_S", 0.05)
    monkeypatch.setattr("penstock.producers.loop.GRACE_S", 0.05)
    one = await serve(teacher=teacher, group_size=2)
    await finished(one)
    await asked.wait()
    one.producer.stop.set()
    await asyncio.wait_for(one.task, 60)
    ((_, fields),) = one.server.client.xrange(KEYS.prompts)
    assert (fields[Field.INDEX], one.server.client.xlen(KEYS.rollouts)) == (b"1", 0)
    assert given_up.is_set()
