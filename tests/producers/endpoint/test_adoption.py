"""Agents' rollouts outlive their producer: two producers on a real server, their engines scripted."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent_client import ADD, ANSWER, CALL, AgentClient, as_plain_client, spelled, tool_user
from chat_templates import decode as text_of
from crashed_producer import free_claims, kill
from penstock.producers.endpoint.access import KEY
from penstock.producers.endpoint.adoption import adopt
from penstock.producers.endpoint.call_ledger import Call, digest
from penstock.producers.endpoint.groups import AgentGroup
from penstock.producers.endpoint.holders import FORWARDED
from penstock.producers.endpoint.recording import Begun, Ended, KeptCall, RunningCall, decode, encode
from penstock.producers.interfaces import Completion
from penstock.producers.rollout.adoption import UnusableProgressError
from penstock.producers.stream import progress_store
from penstock.producers.stream.in_flight import Claim
from penstock.producers.stream.journals import Journal, JournalHolder, Journals
from penstock.schemas.config import EndpointConfig
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    EngineFingerprint,
    RolloutGroup,
    SamplingSettings,
    VersionSpan,
    pack_floats,
    pack_ids,
    unpack_ids,
)
from producer_run import KEYS, QUICK
from scripted_engine import FINGERPRINT, ScriptedEngine
from tool_caller import ToolCaller
from waiting import until

pytestmark = pytest.mark.redis

ASKED = [{"role": "user", "content": "what is three plus four"}]
QUICK_PRODUCERS = replace(QUICK, claim_idle_s=600.0)
PORTLESS = EndpointConfig(port=0, idle_timeout_s=20.0, group_deadline_s=40.0)


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """What an agent was told is in Redis, however slow this machine is."""
    monkeypatch.setattr("penstock.producers.endpoint.agents.SAVE_S", 60.0)


def path_of(rollout: dict, what: str = "v1/chat/completions") -> str:
    return f"/r/{rollout['id']}/{what}"


async def take_for_dead(one) -> None:
    """What a producer holds is free for others, as if it had been suspended for a while; it goes on."""

    async def not_refreshed(by_stream: dict) -> None:
        pass

    async with one.producer.table.marking:
        one.producer.claims.refresh = not_refreshed
    free_claims(one)


async def taken_over_by(two, index: int = 1) -> None:
    holder = JournalHolder(two.producer.context.instance, two.producer_id)
    await until(lambda: JournalHolder.of(two.server.client.lindex(KEYS.progress(index), 0)) == holder)


async def asked_nothing(journals: object) -> None:
    """In place of `Journals.find_moved`: a producer that has not asked yet."""


def journals_of(one):
    return one.producer.endpoint.agents.journals


async def stop(one) -> None:
    one.producer.stop.set()
    await asyncio.wait_for(one.task, 90)


async def asked_again(one, rollout: dict, body: dict) -> dict:
    """The answer to a request that is sent until a producer holds the rollout."""
    async with asyncio.timeout(60):
        while True:
            status, answer = await one.client.request("POST", path_of(rollout), body)
            if status == 200:
                return answer["choices"][0]["message"]
            assert (status, answer["error"]["code"]) == (503, "rollout_moving"), answer
            await asyncio.sleep(0.05)


def resumable(prompt_ids: list[int], sibling: int) -> list[int]:
    """As `tool_user`, also where an answer has begun already."""
    script = tool_user()
    for num in range(len(spelled(CALL)), 0, -1):
        before, begun = prompt_ids[:-num], prompt_ids[-num:]
        opened = text_of("chatml", before).count("<|im_start|>") > 1
        if opened and (whole := script(before, sibling))[:num] == begun:
            return whole[num:]
    return script(prompt_ids, sibling)


def sampled(group: RolloutGroup) -> list[list[list[int]]]:
    """The runs of sampled tokens of each rollout, in all segments."""
    return [
        [unpack_ids(part.token_ids)[start:end].tolist() for part in one.segments for start, end in part.loss_mask]
        for one in group.rollouts
    ]


def versions(group: RolloutGroup) -> list[list[int]]:
    return [[span.version for part in one.segments for span in part.version_spans] for one in group.rollouts]


@pytest.mark.parametrize("end", [kill, stop])
async def test_conversations_go_on_at_another_producer(serve, monkeypatch, end) -> None:
    """A finished sibling is whole, the others go on with what they were told, each token under its own policy."""
    monkeypatch.setattr("penstock.producers.loop.GRACE_S", 0.1)
    one = await serve(group_size=3)
    one.trainer.release(1, 1)
    rollouts = [await one.client.open() for _ in range(2)]
    finished = await one.client.converse(rollouts[0])
    await one.client.finish(rollouts[0], 0.25, steps=2.0)
    first = await one.client.chat(rollouts[1], ASKED, tools=[ADD])
    one.trainer.announce(1)
    two = await serve(producer_id="b", beside=one, group_size=3)
    await end(one)
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "7"}
    body = {"messages": [*ASKED, as_plain_client(first), result], "tools": [ADD]}
    second = await asked_again(two, rollouts[1], body)
    told = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["content"] == ANSWER and second["prompt_token_ids"][: len(told)] == told
    await two.client.finish(rollouts[1], 0.5)
    third = await two.client.open()  # the place that nobody had taken
    assert third["index"] == 1
    await two.client.converse(third, 1)
    await two.client.finish(third, 0.75)
    (group,) = await two.groups(1)
    assert [(one.reward.value, one.reward.parts) for one in group.rollouts] == [
        (0.25, {"steps": 2.0}), (0.5, {}), (0.75, {}),
    ]  # fmt: skip
    script = tool_user()
    assert sampled(group)[1] == [first["generation_token_ids"], second["generation_token_ids"]]
    assert sampled(group)[0][0] == script(first["prompt_token_ids"], 0) and finished[3]["content"] == ANSWER
    assert versions(group)[:2] == [[0, 0], [0, 1]]
    assert group.num_tries_lost == 0 and group.missing == "" and group.producer_id == "b"
    assert two.count("penstock_progress_tokens_total", what="adopted") == sum(
        len(run) for runs in (sampled(group)[0], sampled(group)[1][:1]) for run in runs
    )
    await until(lambda: one.server.client.xlen(KEYS.prompts) == 0 and not one.server.client.exists(KEYS.progress(1)))
    assert one.dead_rollouts() == []


async def test_a_call_in_flight_goes_on_from_its_last_saved_token(serve, opened) -> None:
    """Though a producer had it in between which nobody has asked."""
    one, rollout = await opened(ScriptedEngine(script=tool_user(), token_s=0.02, max_model_len=4096), group_size=1)
    asking = asyncio.create_task(one.client.request("POST", path_of(rollout), {"messages": ASKED}))
    await until(lambda: one.engine.requests and len(one.engine.sampled(one.engine.requests[0])[0].token_ids) >= 48)
    await one.producer.endpoint.agents.save_all()
    saved = unpack_ids(one.engine.sampled(one.engine.requests[0])[0].token_ids).tolist()[:12]
    await kill(one)
    await asyncio.gather(asking, return_exceptions=True)
    await taken_over_by(middle := await serve(producer_id="m", beside=one, group_size=1))
    await kill(middle)
    one.trainer.announce(1)
    given: list[list[int]] = []

    def rest(prompt_ids: list[int], sibling: int) -> list[int]:
        given.append(prompt_ids)
        return spelled("the rest")

    two = await serve(ScriptedEngine(script=rest, max_model_len=4096), "b", beside=one, group_size=1)
    reply = await asked_again(two, rollout, {"messages": ASKED})
    ids = reply["generation_token_ids"]
    assert given == [reply["prompt_token_ids"] + ids[: -len(spelled("the rest"))]] and ids[:12] == saved
    await two.client.finish(rollout, 1.0)
    (group,) = await two.groups(1)
    assert sampled(group) == [[ids]] and versions(group) == [[0, 1]]
    assert two.count("penstock_agent_tokens_total") == len(ids)


async def test_an_answer_that_its_client_may_not_have_read_is_given_again(serve, opened) -> None:
    """It is trained once, and its calls keep their ids."""
    one, rollout = await opened(group_size=1)
    first = await one.client.chat(rollout, ASKED, tools=[ADD])
    await kill(one)
    two = await serve(producer_id="b", beside=one, group_size=1)
    again = await asked_again(two, rollout, {"messages": ASKED, "tools": [ADD]})
    assert again == first and two.engine.requests == []
    await two.client.chat(rollout, ASKED, tools=[ADD])  # read over a connection that stays: asked for on purpose
    assert len(two.engine.requests) == 1
    await two.client.finish(rollout, 1.0)
    (group,) = await two.groups(1)
    assert sampled(group) == [[first["generation_token_ids"]] * 2]


async def test_every_producer_serves_every_rollout(serve, monkeypatch) -> None:
    """A request that is passed on carries the key that it came with, and no other."""
    monkeypatch.setenv(KEY, "secret")
    one = await serve(producer_id="host/0~1", group_size=1, key="secret")
    two = await serve(producer_id="b", beside=one, group_size=1, key="secret")
    one.trainer.release(1, 1)
    rollout = await one.client.open()
    await until(lambda: one.url.encode() in (one.server.client.get(KEYS.producer("host/0~1")) or b""))
    reply = await two.client.chat(rollout, ASKED)
    stranger = AgentClient(two.url, "guessed")
    assert (await stranger.request("POST", path_of(rollout), {"messages": ASKED}))[0] == 401
    await stranger.close()
    assert len(one.engine.requests) == 1 and two.engine.requests == []
    status, kind, text = await two.client.text(path_of(rollout), {"messages": ASKED, "stream": True})
    assert (status, kind) == (200, "text/event-stream") and text.endswith("data: [DONE]\n\n")
    assert await two.client.error("POST", path_of(rollout), {"messages": ASKED, "n": 2}) == (400, "unsupported_value")
    await two.client.finish(rollout, 1.0)
    assert sampled((await one.groups(1))[0]) == [[reply["generation_token_ids"]] * 2]
    status, body = await two.client.request("POST", path_of(rollout), {"messages": ASKED})
    assert (status, body["error"]["code"]) == (410, "rollout_ended")  # the one that has opened it knows
    await until(lambda: not one.server.client.exists(KEYS.progress(1)))
    for unknown in ("nobody", "nobody.0123", "b.0123", "b.1.0123", "nobody.9.0123", "b.x.1"):
        assert await two.client.error("GET", f"/r/{unknown}/v1/models") == (404, "no_such_rollout")


async def test_a_rollout_that_nobody_holds_is_asked_for_again(serve) -> None:
    """Its producer is gone; the other has no room, or is not who it is thought to be."""
    one = await serve(group_size=1)
    one.trainer.release(1, 2)
    rollout = await one.client.open()
    full = replace(QUICK_PRODUCERS, groups_in_flight=1)
    two = await serve(producer_id="b", beside=one, group_size=1, producers=full)
    other = await two.client.open()
    await kill(one)
    path = path_of(rollout)
    async with two.client.session.post(path, json={"messages": ASKED}) as reply:
        assert reply.status == 503 and reply.headers["Retry-After"] == "2"
        assert (await reply.json())["error"]["code"] == "rollout_moving"
    one.server.client.delete(KEYS.producer("a"))
    assert (await two.client.request("POST", path, {"messages": ASKED}))[0] == 503
    async with two.client.session.post(path, json={"messages": ASKED}, headers={FORWARDED: "c"}) as reply:
        assert reply.status == 503
    await two.client.chat(other, ASKED)
    await two.client.finish(other, 1.0)
    await asked_again(two, rollout, {"messages": ASKED})


async def test_progress_that_is_of_no_use_begins_anew_and_says_why(serve, opened, caplog) -> None:
    one, rollout = await opened(group_size=1)
    await one.client.chat(rollout, ASKED)
    await kill(one)
    key = KEYS.progress(1)
    one.server.client.rpush(key, one.server.client.rpop(key)[:-3])
    two = await serve(producer_id="b", beside=one, group_size=1)
    status = 503
    while status == 503:
        status, code = await two.client.error("POST", path_of(rollout), {"messages": ASKED})
    assert (status, code) == (404, "no_such_rollout")
    assert "group 1 starts again, its progress cannot be used: DecodeError: Input data was truncated" in caplog.text
    assert two.count("penstock_progress_failures_total", reason="record") == 1
    other = await two.client.open()
    assert other["index"] == 1
    await two.client.chat(other, ASKED)
    await two.client.finish(other, 1.0)
    (group,) = await two.groups(1)
    assert len(group.rollouts) == 1 and group.num_tries_lost == 1


def new_group(answer: str = "", fingerprint: EngineFingerprint = FINGERPRINT) -> AgentGroup:
    return AgentGroup(
        claim=Claim(stream=KEYS.prompts, entry_id=b"1-1", index=1, version=0),
        prompt=Prompt(text="1", answer=answer),
        size=1,
        deadline_s=50.0,
        sampling=SamplingSettings(max_tokens=9),
        producer_id="a",
        fingerprint=fingerprint,
        is_kept=True,
    )


def completion_of(ids: list[int], version: int) -> Completion:
    return Completion(
        token_ids=pack_ids(ids),
        behavior_logprobs=pack_floats([-0.5] * len(ids)),
        version_spans=(VersionSpan(version, 0, len(ids)),) if ids else (),
        finish_reason="stop",
    )


def left(version: int = 0) -> list[bytes]:
    """What a rollout of two calls leaves: an answer, and a continuation of it."""
    group = new_group()
    rollout, base = group.open(), None
    for n, context in enumerate(([1, 2], [5])):
        completion = completion_of([3, 4], version)
        identity = b"%d" % n
        number, ids = rollout.begin_call(identity), pack_ids(context)
        call = Call(number=number, base=base, context=ids, completion=completion, rendered=None, request=identity)
        message = {"role": "assistant", "content": f"said {n}"}
        rollout.record(RunningCall(number, b"prompt", identity, None), call, [*ASKED] * (n + 1), message)
        base = call
    return group.journal.entries


def taken(group: AgentGroup, entries: list[bytes]) -> int:
    return adopt(group, entries, held=0, lag_bound=2, replay=False)


class Partly:
    """Siblings of which one is sampled so far."""

    def __init__(self, completion: Completion) -> None:
        self.completion = completion

    def so_far(self) -> list[Completion]:
        return [self.completion]


def known(group: AgentGroup) -> tuple[object, ...]:
    """What is known of a group's rollout: its end, or what its calls were given and have sampled."""
    (rollout,) = group.rollouts
    calls = [
        (call.t, call.prompt_token_ids, call.generation_token_ids, call.version_spans, call.delivered)
        for call in rollout.ledger.recorded()
    ]
    return rollout.id, rollout.finished, rollout.reason, calls, rollout.ledger.unread, rollout.ledger.num_begun


@given(st.data())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_a_rollout_is_the_same_at_whichever_producer(data: st.DataObject) -> None:
    """Calls answered, partly sampled and repeated, in any order and with a takeover after any of them."""
    group, made = new_group(), itertools.count(3)
    group.open()
    for n in range(data.draw(st.integers(1, 8))):
        (rollout,) = group.rollouts
        action = data.draw(st.sampled_from(["answer", "answer", "part", "repeat"]))
        base = data.draw(st.sampled_from([None, *rollout.ledger.calls]))
        ids = [next(made) for _ in range(data.draw(st.integers(1, 3)))]
        sampled_now = completion_of(ids, version=n % 2)
        request = data.draw(st.sampled_from([call.request for call in rollout.ledger.calls] or [b"x"]))
        request = request if action == "repeat" else b"%d" % n
        number = rollout.begin_call(request, is_retry=data.draw(st.booleans()))
        context = pack_ids([1, n + 100])
        running = RunningCall(number, digest(context), request, Partly(sampled_now))
        if data.draw(st.booleans()) or action == "part":
            rollout.calls[number] = running
            rollout.enter_running()
            del rollout.calls[number]
        if action != "part":
            call = Call(
                number=number, base=base, context=context, completion=sampled_now, rendered=None, request=request
            )
            rollout.record(running, call, [{"role": "user", "content": str(n)}], {"role": "assistant", "content": "a"})
            call.delivered = True
        heir = new_group()
        num_tokens = taken(heir, group.journal.entries)
        assert known(heir)[:-1] == known(group)[:-1] and heir.journal.entries[1:] == group.journal.entries[1:]
        assert num_tokens == group.journal.num_entered == heir.journal.num_entered
        group = heir if data.draw(st.booleans()) else group
    (rollout,) = group.rollouts
    rollout.finish(Reward(value=0.5, parts={"steps": 2.0}))
    heir = new_group()
    taken(heir, group.journal.entries)
    assert known(heir)[:3] == known(group)[:3]


def test_what_was_sampled_in_several_pieces_by_several_holders_is_one_call() -> None:
    """A stop string may end an answer before what was entered while it was sampled."""

    def piece(number: int, ids: list[int], **fields: object) -> bytes:
        completion = completion_of(ids, number)
        return encode(KeptCall(rollout=0, number=number, prompt=b"p", completion=completion, request=b"r", **fields))

    pieces = [piece(0, [3, 4]), piece(0, [5], start=2), piece(1, [6], start=3, replaces=0), piece(1, [7], start=2)]
    for num, ids, spans in [
        (2, [3, 4, 5], (VersionSpan(0, 0, 3),)),
        (3, [3, 4, 5, 6], (VersionSpan(0, 0, 3), VersionSpan(1, 3, 4))),
        (4, [3, 4, 7], (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3))),
    ]:
        group = new_group()
        assert taken(group, [*left()[:2], *pieces[:num]]) == len(ids)
        (call,) = group.rollouts[0].earlier
        assert unpack_ids(call.completion.token_ids).tolist() == ids and call.completion.version_spans == spans


def test_progress_that_breaks_the_rules_is_refused_whole() -> None:
    begun, opened, first, second = left()
    other = replace(FINGERPRINT, version="2")
    newer = encode(Begun(decode(begun).group.replace(b"schema_version\x01", b"schema_version\x02")))
    for group, entries, message in [
        (new_group(), [begun, opened, first[:-3], second], "truncated"),
        (new_group(), [encode(Begun(b"\xc1")), opened], "not a rollout group"),
        (new_group(), [opened, first], "its beginning is missing"),
        (new_group(), [begun, opened, begun], "it begins twice"),
        (new_group(), [begun, first], "IndexError"),
        (new_group(), [begun, opened, second], "call 0 is missing"),
        (new_group(), [begun, opened, encode(replace(decode(first), start=1))], "call 0 is missing"),
        (new_group(), [begun, opened, first, encode(replace(decode(first), start=3))], "call 0 lacks tokens 2 to 3"),
        (new_group(), [begun, opened, opened], "2 siblings, expected at most 1"),
        (new_group(), [newer, opened], "knows 1"),
        (new_group(answer="another"), left(), "index 1 and its prompt, expected this one of index 1"),
        (
            new_group(),
            [begun, opened, encode(replace(decode(first), reply={"role": "assistant", "tool_calls": 5}))],
            "TypeError",
        ),
        (new_group(), [*left(), encode(Ended(rollout=0, reward=Reward(value=1.0)))], "no sampled token to train"),
        (new_group(), left(version=3), "newest token of policy 3, expected 0 or up to 2 steps from it"),
        (new_group(fingerprint=other), left(), r"fingerprint\.version = '1', expected '2'"),
    ]:
        with pytest.raises(UnusableProgressError, match=message):
            taken(group, entries)
        assert group.rollouts == [], message


async def test_without_room_for_it_a_conversation_has_no_progress(serve, caplog, monkeypatch) -> None:
    one = await serve(group_size=1)
    monkeypatch.setattr(progress_store, "MAX_PROGRESS_MB", 0.0015)
    one.trainer.release(1, 1)
    rollout = await one.client.open()
    assert one.server.client.exists(KEYS.progress(1))
    await one.client.converse(rollout, 4)
    assert not one.server.client.exists(KEYS.progress(1))
    assert caplog.text.count("progress of rollouts is not kept: group 1: no room left") == 1
    await one.client.finish(rollout, 1.0)
    assert len((await one.groups(1))[0].rollouts) == 1


class Slow(ToolCaller):
    """Its last turn waits until it may end. tag: of the first message."""

    def __init__(self, tag: str = "") -> None:
        super().__init__()
        self.may_end, self.num_at_end, self.tag = asyncio.Event(), 0, tag
        self._order = itertools.count()

    async def converse(self, prompt, conversation):
        n = next(self._order)
        outer = self

        class Tagged:
            async def chat(self, messages, **fields):
                if len(messages) > 4:
                    outer.num_at_end += 1
                    if n:  # the first one ends in any case
                        await outer.may_end.wait()
                first = {**messages[0], "content": messages[0]["content"] + outer.tag}
                return await conversation.chat([first, *messages[1:]], **fields)

        return await super().converse(prompt, Tagged())


class Silent(ToolCaller):
    """Never asks anything."""

    async def converse(self, prompt, conversation):
        await asyncio.Event().wait()


@pytest.mark.parametrize("tag", ["", "!"])
async def test_an_environment_s_conversation_repeats_its_calls_or_begins_its_group_anew(serve, caplog, tag) -> None:
    """Though a producer had it in between at which it did not come so far. tag: changes its first message."""
    first, second = Slow(), Slow(tag)
    second.may_end.set()
    one = await serve(environment=first, group_size=3)
    one.trainer.release(1, 1)
    await until(lambda: first.num_at_end == 3 and len(first.replies) == 7)
    await one.producer.endpoint.agents.save_all()
    one.trainer.announce(1)
    await kill(one)
    await taken_over_by(middle := await serve(producer_id="m", beside=one, environment=Silent(), group_size=3))
    await kill(middle)
    two = await serve(producer_id="b", beside=one, environment=second, group_size=3)
    (group,) = await two.groups(1)
    assert [len(runs) for runs in sampled(group)] == [3, 3, 3] and group.missing == ""
    said = "group 1 starts again: a repeated conversation has diverged from its recorded calls"
    assert (caplog.text.count(said), group.num_tries_lost) == ((1, 1) if tag else (0, 0))
    if tag:
        assert {version for found in versions(group) for version in found} == {1}
    else:
        assert len(two.engine.requests) == 2  # the last turns of the two that were not finished
        assert all(reply in first.replies for reply in second.replies[:4])
        assert sorted(map(tuple, versions(group))) == [(0, 0, 0), (0, 0, 1), (0, 0, 1)]


async def two_holders(serve, monkeypatch):
    """A producer that was taken for dead in a conversation and has not heard of it, the one that goes on with the
    rollout, that, and its first answer."""
    one = await serve(group_size=1)
    one.trainer.release(1, 1)
    rollout = await one.client.open()
    first = await one.client.chat(rollout, ASKED, tools=[ADD])
    monkeypatch.setattr(journals_of(one), "find_moved", asked_nothing)
    two = await serve(producer_id="b", beside=one, group_size=1)
    await take_for_dead(one)
    await taken_over_by(two)
    return one, two, rollout, first


async def test_a_producer_that_was_taken_for_dead_lets_go_and_passes_its_agents_on(serve, monkeypatch, caplog) -> None:
    """An answer that the new holder would not know is not given, nor is a reward for half of a conversation taken."""
    one, two, rollout, first = await two_holders(serve, monkeypatch)
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "7"}
    messages = [*ASKED, as_plain_client(first), result]
    second = await asked_again(two, rollout, {"messages": messages, "tools": [ADD]})
    more = {"messages": [*messages, as_plain_client(second), {"role": "user", "content": "more"}], "tools": [ADD]}
    assert await one.client.error("POST", path_of(rollout), more) == (503, "rollout_moving")
    assert len(one.producer.table) == 0 and "group 1 continues on another producer" in caplog.text
    third = await asked_again(one, rollout, more)  # passed on
    assert len(two.engine.requests) == 2 and len(one.engine.requests) == 2
    status = 503
    while status == 503:
        status, _ = await one.client.request("POST", path_of(rollout, "finish"), 1.0)
    (group,) = await two.groups(1)
    assert sampled(group) == [[reply["generation_token_ids"] for reply in (first, second, third)]]
    assert group.producer_id == "b" and group.num_tries_lost == 0


async def test_a_reward_is_for_the_holder_of_the_whole_conversation(serve, monkeypatch) -> None:
    asks = Journals.find_moved
    one, _, rollout, _ = await two_holders(serve, monkeypatch)

    async def late(journals: list[Journal]) -> None:
        if one.producer.endpoint._answering:
            await asks(journals_of(one), journals)

    monkeypatch.setattr(journals_of(one), "find_moved", late)
    assert await one.client.error("POST", path_of(rollout, "finish"), 1.0) == (503, "rollout_moving")
    assert one.server.client.xlen(KEYS.rollouts) == 0


async def test_agents_that_went_elsewhere_are_not_idle_here(serve, monkeypatch) -> None:
    """A producer that wakes up after their time would settle the index with nothing."""
    one, two, rollout, _ = await two_holders(serve, monkeypatch)
    one.producer.endpoint.agents.find(rollout["id"]).last_seen = -1e9
    monkeypatch.delattr(journals_of(one), "find_moved")
    await until(lambda: len(one.producer.table) == 0)
    assert one.server.client.xlen(KEYS.rollouts) == 0 and one.dead_rollouts() == []
    reply = await asked_again(two, rollout, {"messages": ASKED})
    await two.client.finish(rollout, 1.0)
    (group,) = await two.groups(1)
    assert sampled(group)[0][-1] == reply["generation_token_ids"]


async def test_a_request_does_not_wait_for_a_producer_that_holds_its_rollout_no_longer(
    serve, opened, monkeypatch
) -> None:
    """It was passed on to one that takes connections and answers nothing."""
    monkeypatch.setattr("penstock.producers.endpoint.holders.HOLDER_S", 0.05)
    one, rollout = await opened(ScriptedEngine(script=tool_user(), token_s=600.0, max_model_len=4096), group_size=1)
    monkeypatch.setattr(journals_of(one), "find_moved", asked_nothing)
    full = replace(QUICK_PRODUCERS, groups_in_flight=1)
    one.trainer.release(2, 2)
    two = await serve(producer_id="b", beside=one, group_size=1, producers=full)
    other = await two.client.open()  # it has no room for what it is to take over
    asking = asyncio.create_task(asked_again(two, rollout, {"messages": ASKED}))
    await until(lambda: one.engine.num_active == 1)
    await take_for_dead(one)
    await two.client.chat(other, ASKED)
    await two.client.finish(other, 1.0)
    await asking
    assert len(two.engine.requests) == 2
    await until(lambda: one.engine.num_active == 0)  # nobody waits for it any more


async def test_an_agent_does_not_wait_for_a_redis_that_is_slow(serve, monkeypatch) -> None:
    monkeypatch.setattr("penstock.producers.endpoint.agents.SAVE_S", 0.05)
    one = await serve(group_size=1)
    one.trainer.release(1, 1)

    async def hangs(journal: Journal) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(journals_of(one), "append", hangs)
    rollout = await one.client.open()
    await one.client.converse(rollout)
    await one.client.finish(rollout, 1.0)
    assert len((await one.groups(1))[0].rollouts) == 1
