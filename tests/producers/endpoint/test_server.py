"""The endpoint as OpenAI clients meet it: shapes, streams, keys, and every error."""

import asyncio
import io
import json

import openai
import pytest

from agent_client import ADD, ANSWER, AgentClient, as_plain_client, spelled, tool_user
from chat_templates import decode, encode
from penstock.producers.endpoint.server import BODY_BYTES, BODY_BYTES_PER_TOKEN
from penstock.schemas.config import EndpointConfig, SamplingConfig
from penstock.schemas.rollout import unpack_ids
from producer_run import KEYS
from scripted_engine import ScriptedEngine
from tag_parser import TagParser
from waiting import until

pytestmark = pytest.mark.redis

ASKED = [{"role": "user", "content": "what is three plus four"}]


def agents_of(one):
    return one.producer.endpoint.agents


def client_of(rollout: dict, **settings: object):
    return openai.AsyncOpenAI(base_url=rollout["base_url"], api_key=settings.pop("api_key", "none"), **settings)


async def test_the_openai_client_drives_a_tool_using_conversation(serve) -> None:
    one = await serve(group_size=2)
    one.trainer.release(1, 1)
    for reward in (0.0, 1.0):
        rollout = await one.client.open()
        async with client_of(rollout) as client:
            (model,) = (await client.models.list()).data
            found = await client.models.retrieve("lab/gpt-anything")
            assert (found.id, found.root) == ("lab/gpt-anything", model.id)
            messages: list = [*ASKED]
            reply = await client.chat.completions.create(model=model.id, messages=messages, tools=[ADD])
            choice = reply.choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
            assert reply.usage.prompt_tokens == len(choice.message.prompt_token_ids)
            assert len(choice.message.generation_token_ids) == len(choice.message.generation_log_probs)
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
            reply = await client.chat.completions.create(model=model.id, messages=messages, tools=[ADD])
            assert reply.choices[0].message.content == ANSWER and reply.choices[0].finish_reason == "stop"
        await one.client.finish(rollout, reward)
    (group,) = await one.groups(1)
    assert [len(rollout.segments) for rollout in group.rollouts] == [1, 1]


async def test_a_stream_has_the_calls_logprobs_and_usage_of_the_finished_message(opened) -> None:
    one, rollout = await opened()
    async with client_of(rollout) as client:
        asked = {"model": "x", "messages": ASKED, "tools": [ADD], "stream": True, "logprobs": True}
        stream = await client.chat.completions.create(**asked, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert call.function.name == "add" and choices[-1].finish_reason == "tool_calls"
        logprobs = [entry.logprob for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert logprobs == choices[-1].delta.generation_log_probs
        assert chunks[-1].usage.completion_tokens == len(choices[-1].delta.generation_token_ids) == len(logprobs)
        history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call.model_dump(exclude={"index"})]}]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "7"})
        stream = await client.chat.completions.create(**asked | {"messages": history})
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER
    assert one.count("penstock_agent_calls_total", prompt="drifted") == 1


async def test_a_request_that_cannot_be_answered_is_refused_in_openai_s_shape(opened) -> None:
    one, rollout = await opened()
    path = f"/r/{rollout['id']}/v1/chat/completions"
    ids = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    foreign = [*ASKED, {"role": "assistant", "content": "seven", **ids}, *ASKED]
    large = io.BytesIO(b"x" * (BODY_BYTES + BODY_BYTES_PER_TOKEN * 4096 + 1))
    for method, where, body, status, code in [
        ("POST", path, b"{", 400, "invalid_json"),
        ("POST", path, {"messages": []}, 400, "invalid_value"),
        ("POST", path, {"messages": ASKED, "n": 2}, 400, "unsupported_value"),
        ("POST", path, {"messages": ASKED, "logit_bias": {"1": 2}}, 400, "unsupported_parameter"),
        ("POST", path, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context_length_exceeded"),
        ("POST", path, {"messages": foreign}, 409, "unknown_token_ids"),
        ("POST", path, large, 413, "body_too_large"),
        ("GET", "/", None, 404, "not_found"),
        ("GET", "/r", None, 405, "method_not_allowed"),
        ("POST", "/r/a.b/v1/completions", None, 404, "not_found"),
    ]:
        found, answer = await one.client.request(method, where, body)
        assert (found, answer["error"]["code"]) == (status, code) and set(answer) == {"error"}, code
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    async with one.client.session.post("/r", headers={"Origin": "http://page.example"}) as page:
        assert page.status == 403 and (await page.json())["error"]["type"] == "permission_error"
    await one.client.chat(rollout, ASKED)  # the rollout is none the worse


async def test_an_answer_is_cut_where_the_request_the_run_or_the_context_says(opened) -> None:
    engine = ScriptedEngine(num_tokens=1000, first_token=300, max_model_len=80)
    one, rollout = await opened(engine, sampling=SamplingConfig(max_tokens=30))
    assert len((await one.client.chat(rollout, ASKED))["generation_token_ids"]) == 30
    assert len((await one.client.chat(rollout, ASKED, max_tokens=7))["generation_token_ids"]) == 7
    long = await one.client.chat(rollout, [{"role": "user", "content": "three plus four " * 13}])
    assert 0 < len(long["generation_token_ids"]) == 80 - len(long["prompt_token_ids"]) < 30


async def test_an_answer_is_trained_up_to_the_token_that_completes_a_stop_string(opened) -> None:
    """The engine may sample on: this one does."""
    one, rollout = await opened(group_size=1)
    script = tool_user()([*encode("chatml", "<|im_start|>tool<|im_end|><|im_start|>")], 0)
    messages = [*ASKED, {"role": "tool", "tool_call_id": "a", "content": "7"}]
    body = {"messages": messages, "stop": ["zzz", "sev"]}
    _, reply = await one.client.request("POST", f"/r/{rollout['id']}/v1/chat/completions", body)
    (choice,) = reply["choices"]
    first = choice["message"]
    assert first["content"] == "therefore " and choice["finish_reason"] == "stop"
    assert decode("chatml", first["generation_token_ids"]) == "therefore sev"
    assert first["generation_token_ids"] == script[: len(first["generation_token_ids"])]
    assert len(first["generation_log_probs"]) == len(first["generation_token_ids"])
    assert one.count("penstock_agent_alternate_stops_total") == 0
    messages += [as_plain_client(first), {"role": "user", "content": "go on"}]
    second = await one.client.chat(rollout, messages)
    so_far = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["prompt_token_ids"][: len(so_far)] == so_far
    await one.client.finish(rollout, 1.0)
    ((segment,),) = [rollout.segments for rollout in (await one.groups(1))[0].rollouts]
    start, end = segment.loss_mask[0]
    assert unpack_ids(segment.token_ids)[start:end].tolist() == first["generation_token_ids"]


async def test_what_a_run_ignores_is_counted_and_logged_once_by_name(opened, caplog) -> None:
    one, rollout = await opened(endpoint=EndpointConfig(port=0, unsupported="ignore"))
    for n in range(2):
        await one.client.chat(rollout, ASKED, temperature=0.1, reasoning_effort="low")
        await one.client.chat(rollout, ASKED, **{f"{'odd' * 40}{k}": 1 for k in range(n, 40 * n)})
    assert one.engine.samplings[0].temperature == 1.0
    assert one.count("penstock_agent_fields_ignored_total", field="temperature") == 2
    assert one.count("penstock_agent_fields_ignored_total", field=("odd" * 40)[:64]) == 39
    await one.client.chat(rollout, ASKED, **{f"odd{k}": 1 for k in range(40)})
    assert one.count("penstock_agent_fields_ignored_total", field="other") == 11
    said = [record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()]
    assert (
        len(said) == 32 and said[0] == "agents send 'temperature', which is ignored (endpoint.unsupported = \"ignore\")"
    )


async def test_vllm_s_own_fields_of_token_ids_come_on_demand(serve) -> None:
    one = await serve()
    one.trainer.release(1, 1)
    async with client_of(await one.client.open()) as client:
        asked = {"model": "x", "messages": ASKED, "logprobs": True}
        extra = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        plain = await client.chat.completions.create(**asked)
        assert not hasattr(plain, "prompt_token_ids") and not hasattr(plain.choices[0], "token_ids")
        reply = await client.chat.completions.create(**asked, extra_body=extra)
        message, ids = reply.choices[0].message, reply.choices[0].token_ids
        assert (reply.prompt_token_ids, ids) == (message.prompt_token_ids, message.generation_token_ids)
        assert [entry.token for entry in reply.choices[0].logprobs.content] == [f"token_id:{one}" for one in ids]
        stream = await client.chat.completions.create(**asked, extra_body=extra, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].prompt_token_ids == reply.prompt_token_ids
        (sampled,) = [chunk.choices[0].token_ids for chunk in chunks if hasattr(chunk.choices[0], "token_ids")]
        assert sampled == ids and not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])


async def test_one_base_url_serves_the_rollouts_that_a_header_or_the_body_names(serve) -> None:
    one = await serve(group_size=2)
    one.trainer.release(1, 1)
    rollouts = [await one.client.open() for _ in range(2)]
    async with client_of({"base_url": f"{one.url}/v1"}, max_retries=0) as client:
        for n, rollout in enumerate(rollouts):
            named = {"X-Session-ID": rollout["id"]}
            for _ in range(n + 1):
                await client.chat.completions.create(model="x", messages=ASKED, extra_headers=named)
            assert (await client.models.list(extra_headers=named)).data
            await one.client.finish(rollout, float(n))
        sessions = {"X-Session-ID": "8f14e45f"}  # a client's own
        for headers, metadata, message in (
            ({}, None, "expected a rollout's id in the path, /r/ID/v1, in the body as metadata.rollout_id"),
            (sessions, {"x": "y"}, "X-Session-ID is '8f14e45f', which is no rollout's id; expected"),
            ({}, {"rollout_id": 3}, "metadata.rollout_id is 3, expected a rollout's id"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await client.responses.create(model="x", input="x", extra_headers=headers, metadata=metadata)
        for headers, metadata in (({"X-Session-ID": "a.1.b"}, None), (sessions, {"rollout_id": "a.1.b"})):
            with pytest.raises(openai.NotFoundError, match="no such rollout"):
                await client.responses.create(model="x", input="x", extra_headers=headers, metadata=metadata)
        one.trainer.release(2, 2)
        rollout = await one.client.open()
        in_body = {"metadata": {"rollout_id": rollout["id"]}, "extra_headers": sessions}
        await client.chat.completions.create(model="x", messages=ASKED, **in_body)
        await client.responses.create(model="x", input=ASKED, **in_body)
        own_path = client.with_options(base_url=rollout["base_url"])
        await own_path.chat.completions.create(model="x", messages=ASKED, extra_headers=sessions)
    (group,) = await one.groups(1)
    assert [len(rollout.segments) for rollout in group.rollouts] == [1, 2]
    assert len(agents_of(one).find(rollout["id"]).ledger.calls) == 3


async def test_a_key_is_asked_of_everybody_on_every_path(serve, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "right")
    one = await serve(key="right", endpoint=EndpointConfig(port=0, host="0.0.0.0"))
    assert one.url.startswith("http://") and "0.0.0.0" not in one.url
    one.trainer.release(1, 1)
    port = one.url.rpartition(":")[2]
    near, stranger = AgentClient(f"http://127.0.0.1:{port}", "right"), AgentClient(f"http://127.0.0.1:{port}", "wrong")
    rollout = await near.open()
    for method, path in (("POST", "/r"), ("GET", f"/r/{rollout['id']}/v1/models"), ("GET", "/nothing")):
        status, body = await stranger.request(method, path)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
    writer.write(b"POST /r HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nContent-Length: 0\r\n\r\n")
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()
    await near.chat(rollout, ASKED)
    await asyncio.gather(near.close(), stranger.close())


async def test_a_port_in_use_makes_way_for_the_next_and_the_heartbeat_says_which(serve) -> None:
    one = await serve()
    port = int(one.url.rpartition(":")[2])
    two = await serve(producer_id="b", beside=one, endpoint=EndpointConfig(port=port))
    assert int(two.url.rpartition(":")[2]) > port
    await until(lambda: two.url.encode() in (one.server.client.get(KEYS.producer("b")) or b""))


async def test_parallel_tool_calls_can_be_switched_off(opened) -> None:
    twice = tool_user()

    def script(prompt_ids: list[int], sibling: int) -> list[int]:
        ids = twice(prompt_ids, sibling)
        return [*ids[:-1], *ids]

    one, rollout = await opened(
        ScriptedEngine(script=script, max_model_len=4096), sampling=SamplingConfig(max_tokens=400)
    )
    assert len((await one.client.chat(rollout, ASKED, tools=[ADD]))["tool_calls"]) == 2
    assert len((await one.client.chat(rollout, ASKED, tools=[ADD], parallel_tool_calls=False))["tool_calls"]) == 1
    without = await one.client.chat(rollout, ASKED, tools=[ADD], tool_choice="none")
    assert "tool_calls" not in without and "<tool_call>" in without["content"]


async def test_half_of_a_surrogate_pair_in_a_call_ends_neither_the_conversation_nor_the_splice(serve, monkeypatch):
    parse = TagParser.parse

    def parse_as_vllm(*given):
        found = parse(*given)
        calls = ((name, json.dumps(json.loads(text), ensure_ascii=False)) for name, text in found.tool_calls)
        return found._replace(tool_calls=tuple(calls))

    monkeypatch.setattr(TagParser, "parse", parse_as_vllm)
    call = spelled('<tool_call>{"name": "add", "arguments": {"a": "\\ud83d", "b": "\\ud83d\\ude00"}}</tool_call>')
    one = await serve(ScriptedEngine(script=lambda *_: call, max_model_len=4096), group_size=1)
    one.trainer.release(1, 1)
    rollout = await one.client.open()
    messages = await one.client.converse(rollout, 3)
    assert {each["tool_calls"][0]["function"]["arguments"] for each in messages[1::2]} == {
        '{"a": "\\ud83d", "b": "\U0001f600"}'
    }
    await one.client.finish(rollout, 1.0)
    ((segment,),) = [each.segments for each in (await one.groups(1))[0].rollouts]
    assert len(segment.loss_mask) == 3
