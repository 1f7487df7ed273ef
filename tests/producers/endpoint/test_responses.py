"""OpenAI's Responses API: the real client's conversations, token-exact as chat completions are."""

import json

import openai
import pytest

from agent_client import ADD, ANSWER, tool_user
from chat_templates import decode, encode
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.requests import parse_chat
from penstock.producers.endpoint.chat.responses import as_chat
from penstock.schemas.rollout import SamplingSettings, unpack_ids
from scripted_engine import ScriptedEngine

TASK = "what is three plus four"
TOOL = {"type": "function", **ADD["function"]}
FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


def thinking(prompt_ids: list[int], sibling: int) -> list[int]:
    """Spelled letter by letter: reasoning, a text and two calls; then an answer."""
    last = decode("chatml", prompt_ids).split("<|im_start|>")[-2]
    if last.startswith("tool"):
        return [token for letter in "seven" for token in encode("chatml", letter)] + encode("chatml", "<|im_end|>")
    call = tool_user()(prompt_ids, sibling)
    said = "<think>\nhard\n</think>\n\nlet me see"
    return [token for letter in said for token in encode("chatml", letter)] + call[:-1] + call


async def converse(client: openai.AsyncOpenAI, *, stream: bool, keep_ids: bool) -> list:
    """Two turns and the tools in between; returns both responses."""
    history: list = [{"role": "user", "content": TASK}]
    found = []
    for _ in range(2):
        asked = {"model": "x", "input": history, "tools": [TOOL], "instructions": "be brief", "store": False}
        if stream:
            async with client.responses.stream(**asked) as events:
                async for _ in events:
                    pass
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**asked)
        found.append(response)
        for item in response.output:
            dumped = item.model_dump(exclude_unset=True, exclude={"parsed", "parsed_arguments"})
            history.append(dumped if keep_ids else {name: dumped[name] for name in dumped if name not in FIELDS})
            if item.type == "function_call":
                assert json.loads(item.arguments) == {"a": 3, "b": 4}
        for item in response.output:
            if item.type == "function_call":
                history.append({"type": "function_call_output", "call_id": item.call_id, "output": "7"})
    return found


@pytest.mark.redis
@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_client_s_responses_are_one_exact_segment(serve, stream: bool) -> None:
    one = await serve(ScriptedEngine(script=thinking, max_model_len=4096), group_size=2)
    one.trainer.release(1, 1)
    for keep_ids in (True, False):
        rollout = await one.client.open()
        async with openai.AsyncOpenAI(base_url=rollout["base_url"], api_key="none") as client:
            first, second = await converse(client, stream=stream, keep_ids=keep_ids)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert first.output[0].content[0].text == "hard" and first.output_text == "let me see"
        assert (second.output_text, second.status, second.usage.output_tokens) == ("seven", "completed", 6)
        assert len({item.id for item in (*first.output, *second.output)}) == 5
        assert first.id != second.id and rollout["id"] in first.id
        await one.client.finish(rollout, 1.0)
    (group,) = await one.groups(1)
    for rollout in group.rollouts:
        (segment,) = rollout.segments
        ids = unpack_ids(segment.token_ids).tolist()
        (start, end), (begin, close) = segment.loss_mask
        assert ids[start:end] == thinking(ids[:start], 0) and ids[begin:close] == thinking(ids[:begin], 0)
        assert "<|im_start|>system\nbe brief<|im_end|>" in decode("chatml", ids[:start])
        assert decode("chatml", ids[end:begin]).count("<|im_start|>tool\n7<|im_end|>") == 2


@pytest.mark.redis
async def test_a_conversation_goes_on_through_either_api(opened) -> None:
    one, rollout = await opened(group_size=1)
    async with openai.AsyncOpenAI(base_url=rollout["base_url"], api_key="none") as client:
        response = await client.responses.create(model="x", input=TASK, tools=[TOOL])
        (call,) = response.output
        function = {"name": call.name, "arguments": call.arguments}
        said = {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]}
        result = {"role": "tool", "tool_call_id": call.call_id, "content": "7"}
        reply = await one.client.chat(rollout, [{"role": "user", "content": TASK}, said, result], tools=[ADD])
    assert reply["content"] == ANSWER
    await one.client.finish(rollout, 1.0)
    assert [len(each.segments) for each in (await one.groups(1))[0].rollouts] == [1]


@pytest.mark.redis
async def test_a_response_that_is_cut_says_so_and_has_its_logprobs(serve) -> None:
    one = await serve(ScriptedEngine(num_tokens=100, first_token=300, finish_reasons={0: "length"}))
    one.trainer.release(1, 1)
    async with openai.AsyncOpenAI(base_url=(await one.client.open())["base_url"], api_key="none") as client:
        asked = {"model": "x", "input": TASK, "max_output_tokens": 7, "include": ["message.output_text.logprobs"]}
        response = await client.responses.create(**asked)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        (part,) = response.output[0].content
        assert [entry.logprob for entry in part.logprobs] == response.output[0].generation_log_probs
        kinds = [event.type async for event in await client.responses.create(**asked, stream=True)]
        assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"


def test_a_request_becomes_the_chat_completion_s_that_asks_for_the_same() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}", "id": "fc_1"}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]},
        call,
        {**call, "call_id": "b", "prompt_token_ids": [1]},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "7"}]},
        {"role": "assistant", "content": "so"},
        {"role": "assistant", "content": "and so"},
    ]
    asked = as_chat({"input": items, "instructions": "brief", "tools": [TOOL], "text": {"format": {"type": "text"}}})
    system, user, answer, result, *rest = asked["messages"]
    assert (system, user["role"], answer["reasoning"]) == ({"role": "system", "content": "brief"}, "user", "hm")
    assert [one["id"] for one in answer["tool_calls"]] == ["a", "b"] and answer["prompt_token_ids"] == [1]
    assert (result["role"], result["tool_call_id"]) == ("tool", "a")
    assert [one["content"] for one in rest] == ["so", "and so"]
    request = parse_chat(asked, SamplingSettings())
    assert request.tools == [ADD] and not request.ignored


def test_what_cannot_be_answered_is_refused_by_the_name_that_was_sent() -> None:
    image, call = {"role": "user", "content": [{"type": "input_image"}]}, {"type": "function_call", "call_id": "x"}
    for fields, message in [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is 'resp_1': responses are not stored",
        ),
        ({"background": True}, "background is True: responses are not stored"),
        ({"input": []}, r"input is \[\], expected a list of objects"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            r"input\[0\].type is 'item_reference'",
        ),
        ({"input": [image]}, r"input\[0\].content\[0\] is an image"),
        ({"input": [call]}, r"input\[0\].tool_calls holds .*calls of functions"),
        ({"instructions": 3}, "instructions.content is a number, expected text"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] is .*web_search.*, expected a function"),
        ({"text": {"format": {"type": "json_schema"}}}, "text is .*json_schema.*: not supported"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning is {'effort': 'low'}: not supported"),
        ({"truncation": "auto"}, "truncation is 'auto': not supported"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice is .*, expected 'auto' or 'none'"),
    ]:
        with pytest.raises(ApiError, match=message) as caught:
            parse_chat(as_chat({"input": "x", **fields}), SamplingSettings())
        assert caught.value.status == 400
