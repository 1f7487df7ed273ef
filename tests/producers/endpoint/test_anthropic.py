"""Anthropic's Messages API: the real client's conversations, token-exact as chat completions are."""

import json
import re
from typing import Any

import anthropic
import pytest

from agent_client import ADD, ANSWER, CALL, spelled
from chat_templates import decode
from penstock.producers.endpoint.chat.anthropic import as_chat, as_message
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.messages import canonical_form
from penstock.producers.endpoint.chat.requests import parse_chat
from penstock.schemas.rollout import SamplingSettings, unpack_ids
from scripted_engine import ScriptedEngine

TASK = "what is three plus four"
TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}
FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
CACHED = {"cache_control": {"type": "ephemeral"}}


def base_url(rollout: dict[str, Any]) -> str:
    return rollout["base_url"].removesuffix("/v1")  # which the client adds


def thinking(prompt_ids: list[int], sibling: int) -> list[int]:
    """Twice reasoning, a text and two calls; then an answer."""
    if decode("chatml", prompt_ids).count("<|im_start|>tool\n") >= 4:
        return spelled("seven")
    return spelled(f"<think>\nhard\n</think>\n\nlet me see{CALL}{CALL}")


async def converse(client: anthropic.AsyncAnthropic, *, stream: bool, keep_ids: bool) -> list:
    """Three turns and the tools in between, with what Claude Code adds; returns the answers."""
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK, **CACHED}]}]
    found = []
    for _ in range(3):
        asked = {"model": "x", "max_tokens": 200, "messages": history, "tools": [TOOL | CACHED]}
        asked |= {"system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief", **CACHED}]}
        asked |= {"metadata": {"user_id": "me"}, "tool_choice": {"type": "auto"}, "thinking": {"type": "adaptive"}}
        counted = {name: asked[name] for name in ("model", "messages", "tools", "system", "tool_choice", "thinking")}
        count = await client.messages.count_tokens(**counted)
        if stream:
            async with client.messages.stream(**asked) as events:
                async for _ in events:
                    pass
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
        assert count.input_tokens == message.usage.input_tokens
        found.append(message)
        ids = {name: getattr(message, name) for name in FIELDS} if keep_ids else {}
        history.append({"role": "assistant", "content": message.content, **ids})
        used = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "7"} for block in used]
        if results:
            assert [block.input for block in used] == [{"a": 3, "b": 4}] * 2
            results[0] |= {"content": [{"type": "text", "text": "7"}], "is_error": False}
            results[1] |= {"content": "none", "is_error": True, **CACHED}
            history.append({"role": "user", "content": [*results, {"type": "text", "text": "go on"}]})
    return found


@pytest.mark.redis
@pytest.mark.parametrize("stream", [False, True])
async def test_the_anthropic_client_s_conversation_is_one_exact_segment(serve, monkeypatch, stream: bool) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    keeps = (False,) if stream else (True, False)  # the client's message of a stream has no ids
    one = await serve(ScriptedEngine(script=thinking, max_model_len=4096), group_size=len(keeps), key="secret")
    one.trainer.release(1, 1)
    for keep_ids in keeps:
        rollout = await one.client.open()
        async with anthropic.AsyncAnthropic(base_url=base_url(rollout), api_key="secret") as client:
            first, second, last = await converse(client, stream=stream, keep_ids=keep_ids)
            assert (await client.models.list()).data[0].type == "model"
        for message in (first, second):
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert (message.content[0].thinking, message.content[1].text) == ("hard", "let me see")
            assert message.content[0].signature and message.stop_reason == "tool_use"
        assert ([block.text for block in last.content], last.stop_reason) == (["seven"], "end_turn")
        assert last.usage.output_tokens == 6 and len({first.id, second.id, last.id}) == 3
        await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    assert len(group.rollouts) == len(keeps)
    for rollout in group.rollouts:
        (segment,) = rollout.segments
        ids = unpack_ids(segment.token_ids).tolist()
        assert [ids[start:end] for start, end in segment.loss_mask] == [
            thinking(ids[:start], 0) for start, _ in segment.loss_mask
        ]
        assert "<|im_start|>system\nbe brief<|im_end|>" in decode("chatml", ids)
        (_, end), (begin, _), _ = segment.loss_mask
        turns = ["tool\n7", "tool\nerror: none", "user\ngo on"]
        assert re.findall(r"<\|im_start\|>((?:tool|user)\n.*?)<\|im_end\|>", decode("chatml", ids[end:begin])) == turns


@pytest.mark.redis
async def test_an_answer_says_how_it_ended(serve) -> None:
    script = {"script": lambda ids, sibling: spelled(ANSWER), "finish_reasons": {0: "length"}}
    one = await serve(ScriptedEngine(**script, max_model_len=4096), group_size=1)
    one.trainer.release(1, 1)
    rollout = await one.client.open()
    asked: dict[str, Any] = {"model": "x", "messages": [{"role": "user", "content": TASK}]}
    async with anthropic.AsyncAnthropic(base_url=base_url(rollout), api_key="none") as client:
        for fields, text, reason, stop in (
            ({"max_tokens": 5}, ANSWER[:5], "max_tokens", None),
            ({"max_tokens": 50, "stop_sequences": ["x", "se", "sev"]}, "therefore ", "stop_sequence", "se"),
        ):
            message = await client.messages.create(**asked, **fields)
            async with client.messages.stream(**asked, **fields) as events:
                streamed = await events.get_final_message()
            for one_of in (message, streamed):
                assert (one_of.content[0].text, one_of.stop_reason, one_of.stop_sequence) == (text, reason, stop)


@pytest.mark.redis
async def test_errors_are_those_that_the_client_knows(serve, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    one = await serve(ScriptedEngine(max_model_len=64), group_size=1, key="secret")
    one.trainer.release(1, 1)
    url = base_url(await one.client.open())

    async def error(text: Any, **settings: Any) -> anthropic.APIStatusError:
        settings = {"base_url": url, "api_key": "secret", "max_retries": 0} | settings
        async with anthropic.AsyncAnthropic(**settings) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await client.messages.create(model="x", max_tokens=9, messages=[{"role": "user", "content": text}])
        assert caught.value.body["type"] == "error"
        return caught.value

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for status, kind, said, given in (
        (400, "invalid_request_error", r"messages\[0\].content\[0\] is an image", {"text": [image]}),
        (400, "invalid_request_error", "prompt is too long: .*tokens > 64 maximum", {"text": "the " * 9000}),
        (401, "authentication_error", "'x-api-key: KEY'", {"text": "x", "api_key": "other"}),
        (404, "not_found_error", "no such rollout", {"text": "x", "base_url": f"{one.url}/r/unknown"}),
        (413, "request_too_large", "the body has more than", {"text": "x" * 2_000_000}),
    ):
        found = await error(**given)
        assert (found.status_code, found.body["error"]["type"]) == (status, kind)
        assert re.search(said, found.body["error"]["message"]), found.body


def turn(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_a_call_that_is_no_json_object_comes_back_as_it_was_sampled() -> None:
    for arguments in ("[1]", "{", '{"a": 1}', "{}", ""):
        call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call], **dict.fromkeys(FIELDS)}
        choice = {"message": message, "finish_reason": "tool_calls", "stop_reason": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        answer = as_message({"id": "chatcmpl-x-1", "model": "x", "choices": [choice], "usage": usage})
        assert isinstance(answer["content"][0]["input"], dict)
        sent = [{"role": "user", "content": "x"}, turn(*answer["content"]), {"role": "user", "content": "y"}]
        back = as_chat({"messages": json.loads(json.dumps(sent))})["messages"][1]
        assert canonical_form(back) == canonical_form(message)


def test_what_cannot_be_answered_is_refused_by_the_name_that_was_sent() -> None:
    image = {"type": "image", "source": {}}
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    for fields, message in [
        ({"messages": []}, r"messages is \[\], expected a list of objects"),
        ({"messages": [turn({"type": "text", "text": "So"})]}, "the last message is the assistant's"),
        ({"system": [image]}, r"system.content\[0\] is an image \('image'\)"),
        ({"said": [{"type": "text", "text": "see"}, image]}, r"messages\[0\].content\[1\] is an image"),
        ({"said": [{"type": "tool_result", "content": [image]}]}, r"messages\[0\].content\[0\].content\[0\] is an im"),
        ({"said": [{"type": "document", "source": {}}]}, r"messages\[0\].content holds .*parts of text"),
        ({"said": [{"type": "tool_use", "name": "add", "input": {}}]}, r"messages\[0\].content holds .*tool_use"),
        ({"said": ["x"]}, r"messages\[0\].content is \['x'\], expected a list of objects"),
        ({"tools": [server_tool]}, r"tools\[0\] is .*web_search.*, expected a function"),
        ({"tools": [TOOL, TOOL]}, r"tools\[0\] and tools\[1\] are both 'add', expected different names"),
        ({"tools": [{"name": "add", "input_schema": 3}]}, r"tools\[0\].function.parameters is 3, expected an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is {'type': 'any'}, expected 'auto' or 'none'"),
        ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice is .*, expected 'auto' or 'none'"),
        ({"tool_choice": "auto"}, "tool_choice is 'auto', expected an object"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is .*: not supported"),
        ({"temperature": 0}, "temperature is 0, expected 1, as the run samples"),
        ({"stop_sequences": [""]}, "stop is .*, expected a text or a list of texts"),
        ({"max_tokens": 0}, "max_tokens is 0, expected 1 or more"),
    ]:
        said = fields.pop("said", TASK)
        with pytest.raises(ApiError, match=message) as caught:
            parse_chat(as_chat({"messages": [{"role": "user", "content": said}], **fields}), SamplingSettings())
        assert caught.value.status == 400


def test_a_request_that_forces_a_call_is_answered_without_it_where_such_fields_are_ignored() -> None:
    asked = {"messages": [{"role": "user", "content": TASK}], "tools": [TOOL, {"type": "bash_20250124", "name": "b"}]}
    asked |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "context_management": {"edits": []}}
    request = parse_chat(as_chat(asked), SamplingSettings(), ignore=True)
    assert (request.ignored, request.parallel_tool_calls) == (
        ("tools: bash_20250124", "context_management", "tool_choice"),
        False,
    )
    assert request.use_tools and request.tools == [ADD]
    assert not parse_chat(
        as_chat(asked | {"tool_choice": {"type": "none"}, "tools": [TOOL]}), SamplingSettings(), ignore=True
    ).use_tools
