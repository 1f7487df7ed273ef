"""Agents' rollouts from their opening to the stream: a whole producer on a real server, its engine scripted."""

import asyncio
import itertools
import json
import math
import time

import msgspec
import openai
import pytest

from agent_client import ADD, ANSWER, AgentClient, tool_user
from penstock.deploy.report.lines import ProducerEvent, ShortGroup, read_lines
from penstock.producers.endpoint.agents import GROUP_BYTES, Agents
from penstock.producers.interfaces import EngineError
from penstock.producers.loop import QuarantinedError
from penstock.schemas.config import EndpointConfig, SamplingConfig
from penstock.schemas.keys import PRODUCERS_GROUP, Field, Kind
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import (
    Segment,
    decode_group,
    died_of_length,
    encode_group,
    pack_ids,
    says_too_long,
    unpack_ids,
)
from penstock.schemas.segments import CallError
from producer_run import KEYS, QUICK, Numbers
from scripted_engine import ScriptedEngine
from waiting import until

pytestmark = pytest.mark.redis

ASKED = [{"role": "user", "content": "what is three plus four"}]


def agents_of(one) -> Agents:
    return one.producer.endpoint.agents


def runs(segment: Segment) -> list[list[int]]:
    ids = unpack_ids(segment.token_ids).tolist()
    return [ids[start:end] for start, end in segment.loss_mask]


async def test_siblings_become_the_group_of_a_released_index_and_train_what_the_engine_saw_and_sampled(serve) -> None:
    """With ids passed back and without."""
    given: list[tuple[list[int], list[int]]] = []
    script = tool_user()

    def record(prompt_ids: list[int], sibling: int) -> list[int]:
        given.append((prompt_ids, script(prompt_ids, sibling)))
        return given[-1][1]

    one = await serve(ScriptedEngine(script=record, max_model_len=4096))
    one.trainer.release(5, 5)
    rollouts = [await one.client.open() for _ in range(4)]
    assert {rollout["index"] for rollout in rollouts} == {5} and len({rollout["id"] for rollout in rollouts}) == 4
    assert rollouts[0]["prompt"]["text"] == "5"
    for n, rollout in enumerate(rollouts):
        messages = await one.client.converse(rollout, 4, keep_ids=n % 2 == 0)
        assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 3, "b": 4}'}
        assert messages[3]["content"] == ANSWER
        await one.client.finish(rollout, n / 4, steps=2.0)
    (group,) = await one.groups(1)
    assert group.index == 5 and [rollout.reward.value for rollout in group.rollouts] == [0, 0.25, 0.5, 0.75]
    assert group.rollouts[0].reward.parts == {"steps": 2.0} and group.sampling.max_tokens == 200
    segments = [segment for rollout in group.rollouts for segment in rollout.segments]
    ids = [unpack_ids(segment.token_ids).tolist() for segment in segments]
    trained = [
        (known[:at], known[at:end]) for known, one in zip(ids, segments, strict=True) for at, end in one.loss_mask
    ]
    assert len(segments) == 4 and sorted(trained) == sorted(given) and len(given) == 16
    await until(lambda: one.server.client.xlen(KEYS.prompts) == 0)
    assert one.count("penstock_agent_calls_total", prompt="first") == 4
    assert one.count("penstock_agent_calls_total", prompt="drifted") == 12
    assert one.count("penstock_agent_tokens_total") == one.count("penstock_agent_tokens_delivered_total") > 0


@pytest.mark.parametrize("asked", ["top_k", "top_logprobs"])
async def test_the_ids_that_an_agent_s_tokens_were_sampled_from_go_with_them(opened, asked) -> None:
    """Through turns, branches, and an answer that ends at a stop string."""
    one, rollout = await opened(sampling=SamplingConfig(max_tokens=200, **{asked: 3}), group_size=1)
    messages = await one.client.converse(rollout, 3)
    await one.client.chat(rollout, [*messages[:3], {"role": "user", "content": "another way"}], stop=["sev", "lv"])
    await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    assert len(group.rollouts[0].segments) == 2
    for segment in group.rollouts[0].segments:
        wanted = [pack_ids([token, token + 1, token + 2]) for run in runs(segment) for token in run]
        if asked == "top_k":
            assert segment.sampling_mask == tuple(wanted) and not segment.top_logprobs
        else:
            assert segment.sampling_mask is None and segment.top_logprobs.ids == b"".join(wanted)


async def test_answers_that_another_token_than_the_end_of_turn_has_ended_are_counted(serve) -> None:
    script = tool_user()
    one = await serve(
        ScriptedEngine(script=lambda ids, n: script(ids, n)[: -1 if len(ids) < 100 else None], max_model_len=4096),
        group_size=1,
    )
    one.trainer.release(1, 1)
    rollout = await one.client.open()
    await one.client.chat(rollout, [{"role": "user", "content": "short"}])
    assert one.count("penstock_agent_alternate_stops_total") == 1
    await one.client.chat(rollout, [{"role": "user", "content": "long " * 50}])
    assert one.count("penstock_agent_alternate_stops_total") == 1


async def test_one_agent_s_calls_side_by_side_are_all_kept(opened) -> None:
    """A summary in between, a sub-agent with a task of its own: segments, and nothing lost."""
    one, rollout = await opened(group_size=2)
    messages = await one.client.converse(rollout, 2)
    compacted = [{"role": "user", "content": "summary"}, messages[-1], {"role": "user", "content": "go on"}]
    await asyncio.gather(
        one.client.chat(rollout, [*messages, {"role": "user", "content": "go on"}], tools=[ADD]),
        one.client.chat(rollout, [{"role": "user", "content": "a sub-agent's task"}]),
        one.client.chat(rollout, compacted),
    )
    await one.client.finish(rollout, 1.0)
    other = await one.client.open()
    await one.client.converse(other, 1)
    await one.client.finish(other, 0.0)
    (group,) = await one.groups(1)
    assert sorted(len(runs(segment)) for segment in group.rollouts[0].segments) == [1, 1, 3]
    assert one.count("penstock_agent_segments_total", reason="new_conversation") == 1
    assert one.count("penstock_agent_segments_total", reason="unknown_history") == 1
    assert one.count("penstock_agent_tokens_total") == one.count("penstock_agent_tokens_delivered_total")


async def test_a_rollout_joins_the_oldest_open_group_before_an_index_is_claimed_on_credit(serve) -> None:
    one = await serve(group_size=2)
    one.trainer.release(1, 2)
    assert [(await one.client.open())["index"] for _ in range(4)] == [1, 1, 2, 2]
    status, body = await one.client.request("POST", "/r")
    assert status == 429 and body["error"]["code"] == "no_credit"
    async with one.client.session.post("/r") as reply:
        assert int(reply.headers["Retry-After"]) > 0
    one.trainer.release(3, 3)
    assert (await one.client.open())["index"] == 3


async def test_a_producer_with_old_weights_takes_no_new_task(serve) -> None:
    one = await serve(group_size=1)
    bound = one.producer.context.config.lag_bound
    one.trainer.release(1, 1, version=bound + 1)
    one.trainer.announce(bound + 1, total_bytes=1, tensors=())  # weights that never load
    await until(lambda: one.producer.weights.behind > bound)
    assert await one.client.error("POST", "/r") == (429, "weights_behind")
    one.trainer.announce(bound + 2)
    assert (await one.client.open())["index"] == 1


async def test_a_call_waits_for_weights_that_are_fresh_enough_for_its_group(serve) -> None:
    one = await serve(group_size=1)
    version = one.producer.context.config.lag_bound + 3
    one.trainer.release(1, 1, version=version)
    rollout = await one.client.open()
    calling = asyncio.create_task(one.client.chat(rollout, ASKED))
    await until(lambda: one.count("penstock_agent_calls_running") == 1)
    assert not calling.done() and one.engine.requests == []
    one.trainer.announce(version)
    await calling
    await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    assert {span.version for span in group.rollouts[0].segments[0].version_spans} == {version}


async def test_an_agent_that_is_silent_after_a_request_leaves_its_group_short_and_says_why(serve, tmp_path) -> None:
    """One whose tool takes long asks for the models; one whose environment is not set up yet has sent nothing."""
    (tmp_path / "test").mkdir(exist_ok=True)
    one = await serve(endpoint=EndpointConfig(port=0, idle_timeout_s=300.0, group_deadline_s=900.0), group_size=3)
    one.trainer.release(1, 1)
    asking, silent, setting_up = [await one.client.open() for _ in range(3)]
    for rollout in (asking, silent):
        await one.client.chat(rollout, ASKED)
        agents_of(one).find(rollout["id"]).last_seen -= 200.0
    async with openai.AsyncOpenAI(base_url=asking["base_url"], api_key="none") as client:
        await client.models.list()
    agents_of(one).end_overdue(time.monotonic() + 150.0)
    assert one.count("penstock_agent_rollouts_open") == 2
    await one.client.chat(setting_up, ASKED)
    for rollout in (asking, setting_up):
        await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    assert len(group.rollouts) == 2 and "1 idle for 300 s" in group.missing
    status, body = await one.client.request("POST", f"/r/{silent['id']}/finish", 1.0)
    assert status == 410 and "idle for 300 s (endpoint.idle_timeout_s)" in body["error"]["message"]
    assert one.count("penstock_agent_rollouts_total", outcome="dead") == 1
    assert one.count("penstock_agent_tokens_total") > one.count("penstock_agent_tokens_delivered_total") > 0
    assert one.dead_rollouts() == [("1", silent["id"], "idle for 300 s (endpoint.idle_timeout_s)")]
    events, _ = read_lines(tmp_path / "test/producers/a.jsonl", ProducerEvent)
    (short,) = [event for event in events if isinstance(event, ShortGroup)]
    assert (short.index, short.finished, short.missing) == (1, 2, group.missing)


async def test_a_group_past_its_deadline_goes_with_what_is_finished_or_dies(serve) -> None:
    one = await serve(endpoint=EndpointConfig(port=0, idle_timeout_s=600.0, group_deadline_s=100.0), group_size=2)
    one.trainer.release(1, 2)
    finished, slow = await one.client.open(), await one.client.open()
    await one.client.converse(finished, 1)
    await one.client.finish(finished, 1.0)
    third = await one.client.open()
    assert third["index"] == 2
    for rollout in (slow, third):
        await one.client.chat(rollout, ASKED)
    agents_of(one).end_overdue(time.monotonic() + 40.0)
    assert one.count("penstock_agent_rollouts_open") == 2
    agents_of(one).end_overdue(time.monotonic() + 100.0)
    entries = {int(fields[Field.INDEX]): fields for fields in await one.entries(2)}
    assert len(decode_group(entries[1][Field.PAYLOAD]).rollouts) == 1
    assert entries[2][Field.KIND] == Kind.DEAD
    assert entries[2][Field.REASON] == (
        b"agents: no rollout of 2 finished: 1 never opened, 1 not finished after 100 s (endpoint.group_deadline_s)"
    )
    assert died_of_length(entries[2][Field.REASON].decode())
    assert says_too_long(decode_group(entries[1][Field.PAYLOAD]).missing)
    assert (await one.client.request("POST", f"/r/{slow['id']}/finish", 1.0))[0] == 410
    overdue = "not finished after 100 s (endpoint.group_deadline_s)"
    assert sorted(one.dead_rollouts()) == [("1", slow["id"], overdue), ("2", third["id"], overdue)]


async def test_a_group_of_which_nothing_was_heard_any_more_was_abandoned(serve) -> None:
    """By agents that fell silent in the middle, and by those that never made a call; an agent that is slow, or whose
    rollout cannot be trained for want of a sampled token, has abandoned nothing."""
    one = await serve(endpoint=EndpointConfig(port=0, idle_timeout_s=50.0, group_deadline_s=100.0), group_size=2)
    one.trainer.release(1, 3)
    silent = [await one.client.open() for _ in range(2)]
    await one.client.chat(silent[0], ASKED)
    await one.client.request("GET", f"/r/{silent[1]['id']}/v1/models")
    agents_of(one).end_overdue(time.monotonic() + 60.0)
    overdue = await one.client.open()
    agents_of(one).find(overdue["id"]).group.deadline = 0.0
    agents_of(one).end_overdue(time.monotonic())
    active = [await one.client.open() for _ in range(2)]
    await one.client.request("GET", f"/r/{active[1]['id']}/v1/models")
    assert await one.client.error("POST", f"/r/{active[0]['id']}/finish", 1.0) == (400, "nothing_sampled")
    agents_of(one).end_overdue(time.monotonic() + 60.0)
    entries = {int(fields[Field.INDEX]): fields[Field.REASON].decode() for fields in await one.entries(3)}
    assert entries == {
        1: "abandoned: nothing was heard of the agents: 2 idle for 50 s (endpoint.idle_timeout_s)",
        2: "abandoned: nothing was heard of the agents: 1 never opened, 1 not finished after 100 s "
        "(endpoint.group_deadline_s)",
        3: "agents: no rollout of 2 finished: 1 idle for 50 s (endpoint.idle_timeout_s), 1 nothing_sampled",
    }
    assert not any(map(died_of_length, entries.values()))


async def test_a_finish_whose_answer_was_lost_may_come_again(opened) -> None:
    one, rollout = await opened()
    await one.client.chat(rollout, ASKED)
    await one.client.finish(rollout, 0.5)
    await one.client.finish(rollout, 0.5)
    status, body = await one.client.request("POST", f"/r/{rollout['id']}/finish", 0.7)
    assert status == 410 and body["error"]["message"].endswith("is finished")
    status, _ = await one.client.request("POST", f"/r/{rollout['id']}/v1/chat/completions", {"messages": ASKED})
    assert status == 410


async def test_a_rollout_that_ends_during_a_call_ends_the_call(opened) -> None:
    one, rollout = await opened(ScriptedEngine(script=tool_user(), token_s=5.0, max_model_len=4096))
    path = f"/r/{rollout['id']}/v1/chat/completions"
    calling = asyncio.create_task(one.client.request("POST", path, {"messages": ASKED}))
    await until(lambda: one.engine.num_active == 1)
    await one.client.request("POST", f"/r/{rollout['id']}/finish", 1.0)
    status, body = await calling
    assert (status, body["error"]["code"]) == (410, "rollout_ended")
    assert body["error"]["message"].endswith("has ended: nothing_sampled"), "as each later request is told"
    assert one.engine.num_active == 0 and len(one.engine.cancelled) == 1


def numbered() -> ScriptedEngine:
    """Answer n is n + 1 tokens long."""
    answers = itertools.count(1)
    return ScriptedEngine(script=lambda ids, n: [300] * next(answers), max_model_len=4096)


async def ask_and_hang_up(one, rollout: dict, body: dict) -> None:
    """Sends a request as AgentClient does, waits until its answer lies in the socket, and closes it unread."""
    data = json.dumps(body).encode()
    host, _, port = one.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1)
    head = f"POST /r/{rollout['id']}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    calls = agents_of(one).find(rollout["id"]).ledger.calls
    num_before = len(calls)
    writer.write(head.encode() + data)
    await until(lambda: len(calls) > num_before and calls[-1].delivered)
    writer.close()
    await writer.wait_closed()
    await until(lambda: calls[-1].connection.is_closing())


async def trained_lengths(one, rollout: dict) -> list[int]:
    await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    return sorted(end - start for one in group.rollouts[0].segments for start, end in one.loss_mask)


async def test_an_answer_that_its_client_hung_up_on_and_asked_for_again_is_not_trained(opened) -> None:
    one, rollout = await opened(numbered(), group_size=1)
    for _ in range(2):
        await ask_and_hang_up(one, rollout, {"messages": ASKED})
    await one.client.chat(rollout, ASKED)
    await ask_and_hang_up(one, rollout, {"messages": [{"role": "user", "content": "never asked again"}]})
    assert await trained_lengths(one, rollout) == [3, 4]


async def test_an_answer_is_unread_if_its_client_counts_a_retry_also_while_it_is_made(opened) -> None:
    """As behind a proxy, whose connection stays."""
    one, rollout = await opened(numbered(), group_size=1)
    path = f"{one.url}/r/{rollout['id']}/v1/chat/completions"

    async def ask(count: str) -> None:
        headers = {"x-stainless-retry-count": count}
        async with one.client.session.post(path, json={"messages": ASKED}, headers=headers) as reply:
            assert reply.status == 200

    for count in ("0", "0", "1", "2"):
        await ask(count)
    one.engine.may_sample.clear()
    first = asyncio.create_task(ask("0"))
    await until(lambda: one.engine.num_active == 1)
    second = asyncio.create_task(ask("1"))
    await until(lambda: one.engine.num_active == 2)
    one.engine.may_sample.set()
    await asyncio.gather(first, second)
    assert await trained_lengths(one, rollout) == [1, 4, 6]


async def test_answers_to_one_request_that_are_all_read_are_all_trained(opened) -> None:
    one, rollout = await opened(numbered(), group_size=1)
    for _ in range(2):
        await one.client.chat(rollout, ASKED)
    await asyncio.gather(*(one.client.chat(rollout, ASKED) for _ in range(2)))
    assert await trained_lengths(one, rollout) == [1, 2, 3, 4]


async def test_a_producer_that_stops_leaves_its_agents_groups_to_the_stream_or_to_others(serve, monkeypatch) -> None:
    """Where they have no progress that others could go on from."""
    monkeypatch.setattr("penstock.producers.loop.GRACE_S", 0.2)
    one = await serve(group_size=4, producers=msgspec.structs.replace(QUICK, progress_s=0.0))
    one.trainer.release(1, 2)
    rollouts = [await one.client.open() for _ in range(6)]
    for rollout in rollouts[:2]:
        await one.client.converse(rollout, 1)
        await one.client.finish(rollout, 1.0)
    one.producer.stop.set()
    await asyncio.wait_for(one.task, 60)
    (group,) = await one.groups(1)
    assert group.index == 1 and len(group.rollouts) == 2
    assert one.server.client.xlen(KEYS.prompts) == 1
    ((_, fields),) = one.server.client.xrange(KEYS.prompts)
    assert fields[Field.INDEX] == b"2"
    two = await serve(producer_id="b", beside=one)
    assert (await two.client.open())["index"] == 2


async def test_a_producer_that_stops_lets_agents_finish_but_opens_no_more(serve, monkeypatch) -> None:
    monkeypatch.setattr("penstock.producers.loop.GRACE_S", 60.0)
    one = await serve(group_size=2)
    one.trainer.release(1, 2)
    rollouts = [await one.client.open(), await one.client.open()]
    one.producer.stop.set()
    await until(lambda: one.producer.endpoint.agents._is_closing)
    assert await one.client.error("POST", "/r") == (503, "stopping")
    for rollout in rollouts:
        await one.client.converse(rollout, 1)
        await one.client.finish(rollout, 1.0)
    await asyncio.wait_for(one.task, 60)
    assert len((await one.groups(1))[0].rollouts) == 2


async def test_a_prompt_that_cannot_be_posed_or_recorded_is_dead_before_an_agent_works_on_it(serve) -> None:
    values = [object(), 2**70, "\ud800", 5]

    class Odd(Numbers):
        def prompt(self, index: int) -> Prompt:
            if index == 5:
                raise LookupError("no such task")
            return Prompt(text="x", metadata={"value": values[index - 1]} if index <= len(values) else {})

    one = await serve(environment=Odd())
    one.trainer.release(1, 6)
    assert (await one.client.open())["index"] == 6
    for fields in await one.entries(5):
        assert fields[Field.KIND] == Kind.DEAD and fields[Field.REASON].startswith(b"prompt: ")


async def test_a_group_that_cannot_be_encoded_is_dead_and_holds_no_claim(serve) -> None:
    """Whether its last rollout finishes or its deadline comes."""
    one = await serve(group_size=2)
    agents = agents_of(one)
    one.trainer.release(1, 2)
    rollouts = [await one.client.open() for _ in range(4)]
    for rollout in rollouts[::2]:
        group = agents.find(rollout["id"]).group
        group.fingerprint = msgspec.structs.replace(group.fingerprint, other={"value": object()})
    for rollout in rollouts[:3]:
        await one.client.converse(rollout, 1)
        await one.client.finish(rollout, 1.0)
    agents.end_overdue(math.inf)
    for fields in await one.entries(2):
        assert fields[Field.KIND] == Kind.DEAD and fields[Field.REASON].startswith(b"producer: TypeError")
    await until(lambda: not one.producer.table)
    assert one.count("penstock_agent_tokens_total") > 0 == one.count("penstock_agent_tokens_delivered_total")
    assert not one.task.done()


async def test_a_rollout_that_would_make_its_group_too_large_is_told_at_the_call(serve, monkeypatch) -> None:
    monkeypatch.setattr("penstock.producers.endpoint.agents.MAX_ENTRY_BYTES", GROUP_BYTES + 2 * 8000)
    one = await serve(group_size=2)
    one.trainer.release(1, 1)
    rollouts = [await one.client.open(), await one.client.open()]
    path = f"/r/{rollouts[0]['id']}/v1/chat/completions"
    question = {"messages": [{"role": "user", "content": "three plus four " * 40}]}
    statuses = []
    while not statuses or statuses[-1] == 200:
        status, body = await one.client.request("POST", path, question)
        statuses.append(status)
    assert len(statuses) > 2 and len(one.engine.requests) == len(statuses) - 1
    assert (status, body["error"]["code"], body["error"]["type"]) == (400, "rollout_too_large", "invalid_request_error")
    await one.client.converse(rollouts[1], 1)
    for rollout in rollouts:
        await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    assert [len(rollout.segments) for rollout in group.rollouts] == [len(statuses) - 1, 1]
    assert len(encode_group(group)) < GROUP_BYTES + 2 * 8000


async def test_what_no_record_can_hold_costs_its_own_rollout_alone(serve, monkeypatch) -> None:
    """A reward that is too large, and calls that contradict themselves."""

    def refuse(calls):
        raise CallError("logprob_length_mismatch", "call '0': 1 behavior_logprobs for 2")

    monkeypatch.setattr("penstock.producers.endpoint.agents.MAX_ENTRY_BYTES", GROUP_BYTES + 3 * 2500)
    one = await serve(group_size=3)
    one.trainer.release(1, 1)
    large, torn, sound = [await one.client.open() for _ in range(3)]
    for rollout in (large, torn, sound):
        await one.client.converse(rollout, 1)
    body = {"reward": 1.0, "metrics": {f"{n:064}": 1.0 for n in range(32)}}
    assert await one.client.error("POST", f"/r/{large['id']}/finish", body) == (400, "rollout_too_large")
    with monkeypatch.context() as patch:
        patch.setattr("penstock.producers.endpoint.groups.segments", refuse)
        assert await one.client.error("POST", f"/r/{torn['id']}/finish", 1.0) == (400, "logprob_length_mismatch")
    await one.client.finish(sound, 0.5)
    (group,) = await one.groups(1)
    assert [rollout.reward.value for rollout in group.rollouts] == [0.5]


async def test_a_group_that_nobody_opens_is_handed_back(serve) -> None:
    one = await serve(endpoint=EndpointConfig(port=0, idle_timeout_s=0.2, group_deadline_s=90.0))
    one.trainer.release(1, 1)
    ((released, _),) = one.server.client.xrange(KEYS.prompts)
    assert await agents_of(one).claim() and len(one.producer.table) == 1
    await until(lambda: not one.producer.table)
    ((again, fields),) = one.server.client.xrange(KEYS.prompts)
    assert again != released and (fields[Field.INDEX], fields[Field.ATTEMPT]) == (b"1", b"0")
    assert (await one.client.open())["index"] == 1


async def test_a_quarantined_producer_ends_and_hands_its_groups_back_once(serve, monkeypatch) -> None:
    """One group that agents have opened, and one that nobody has."""
    monkeypatch.setattr("penstock.producers.stream.heartbeat.HEARTBEAT_S", 0.05)
    one = await serve(endpoint=EndpointConfig(port=0, idle_timeout_s=300.0, group_deadline_s=600.0))
    client = one.server.client
    one.trainer.release(1, 2)
    await one.client.converse(await one.client.open(), 1)
    assert await agents_of(one).claim() and len(one.producer.table) == 2
    one.quarantine()
    with pytest.raises(QuarantinedError, match="it is quarantined: raw logprobs"):
        await asyncio.wait_for(asyncio.shield(one.task), 60)
    assert sorted(fields[Field.INDEX] for _, fields in client.xrange(KEYS.prompts)) == [b"1", b"2"]
    assert client.xpending(KEYS.prompts, PRODUCERS_GROUP)["pending"] == 0
    assert client.xlen(KEYS.rollouts) == 0 and client.xlen(KEYS.dead) == 0


async def test_agents_leave_evaluations_a_place(serve) -> None:
    producers = msgspec.structs.replace(QUICK, groups_in_flight=2)
    one = await serve(group_size=2, producers=producers, sampling=SamplingConfig(max_tokens=4))
    one.trainer.release(1, 2)
    assert [(await one.client.open())["index"] for _ in range(2)] == [1, 1]
    assert await one.client.error("POST", "/r") == (429, "no_room")
    one.trainer.evaluate(0, 3)
    await until(lambda: one.server.client.xlen(KEYS.evaluation_results) == 3)


async def test_an_engine_that_dies_when_a_client_hangs_up_ends_the_producer(opened) -> None:
    class Frail(ScriptedEngine):
        async def generate(self, *request):
            try:
                return await super().generate(*request)
            except asyncio.CancelledError:
                raise EngineError("died of an abort") from None

    one, rollout = await opened(Frail(script=tool_user(), token_s=60.0, max_model_len=4096))
    hasty = AgentClient(one.url)
    calling = asyncio.create_task(hasty.chat(rollout, ASKED))
    await until(lambda: one.engine.num_active == 1)
    calling.cancel()
    await hasty.close()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(one.task, 60)
    assert caught.group_contains(EngineError)
