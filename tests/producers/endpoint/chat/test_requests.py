"""Requests that an agent may send, and the errors for the others."""

import json
from typing import Any

import msgspec
import pytest

from penstock.producers.endpoint.chat.bodies import parse_finish, parse_json
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.requests import parse_chat
from penstock.producers.endpoint.chat.responses import as_chat
from penstock.producers.endpoint.chat.sizes import num_parts
from penstock.schemas.rollout import SamplingSettings

SAMPLING = SamplingSettings(temperature=0.8, max_tokens=64)
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(**fields: object):
    return parse_chat({"messages": MESSAGES, **fields}, SAMPLING)


def test_what_leaves_the_distribution_alone_is_accepted() -> None:
    request = chat(
        model="gpt-anything", user="me", seed=7, temperature=0.8, top_p=1, n=1, stop=None, stop_token_ids=[],
        frequency_penalty=0, presence_penalty=0.0, logit_bias={}, response_format={"type": "text"}, tools=[TOOL],
        tool_choice="auto", parallel_tool_calls=False, stream=True, stream_options={"include_usage": True},
        logprobs=True, top_logprobs=0, max_tokens=9, max_completion_tokens=12,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert request.tools == [TOOL] and request.use_tools and not request.parallel_tool_calls
    assert request.stream and request.include_usage and request.logprobs
    assert request.max_tokens == 9
    assert request.template_arguments == {"enable_thinking": False}


def test_what_would_bend_the_distribution_is_refused_by_name() -> None:
    for field, value, message in [
        ("n", 2, "n is 2, expected 1"),
        ("temperature", 0, "temperature is 0, expected 0.8, as the run samples"),
        ("top_p", 0.9, "top_p is 0.9, expected 1, as the run samples"),
        ("top_k", 5, "top_k is 5, expected 0"),
        ("logit_bias", {"5": 1}, "logit_bias is {'5': 1}: not supported"),
        ("frequency_penalty", 0.1, "frequency_penalty is 0.1, expected 0"),
        ("top_logprobs", 3, "top_logprobs is 3, expected 0"),
        ("stop", ["\n", ""], "stop is .*, expected a text or a list of texts, none of them empty"),
        ("stop", 3, "stop is 3, expected a text"),
        ("stop_token_ids", [3], r"stop_token_ids is \[3\], expected \[\], as the run samples"),
        ("min_tokens", 3, "min_tokens is 3, expected 0"),
        ("response_format", {"type": "json_object"}, "response_format is .*, expected {'type': 'text'}"),
        ("guided_json", {"type": "object"}, "guided_json is .*: not supported"),
        ("tool_choice", "required", "tool_choice is 'required', expected 'auto' or 'none': to force a"),
        ("max_tokens", 0, "max_tokens is 0, expected 1 or more"),
        ("max_output_tokens", "9", "max_output_tokens is '9', expected 1 or more"),
        ("reasoning_effort", "low", "reasoning_effort is 'low': not supported"),
        ("stream", "yes", "stream is 'yes', expected true or false"),
        ("messages", [], "messages is .*, expected a list of objects"),
        ("messages", [{"content": "x"}], r"messages\[0\].role is None"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "expected parts of text"),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "a"}]}], "expected calls of functions"),
        ("tools", [{"type": "function"}], r"tools\[0\] is .*, expected a function"),
        ("tools", [{"function": {"name": "f", "parameters": "x"}}], r"tools\[0\].function.parameters is 'x'"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}, "expected an object of the template's own variables"),
        ("stop", ["a"] * 65, "stop has 65 texts of up to 1 characters, expected at most 64 of up to 1024"),
        ("stop", "a" * 1025, "stop has 1 texts of up to 1025 characters, expected at most 64 of up to 1024"),
        ("tools", [TOOL] * 1025, "tools has 1025 tools, expected at most 1024"),
        ("temperature", list(range(250_000)), r"temperature is \[0, 1, 2, .*\.\.\.\], expected 0.8"),
    ]:
        with pytest.raises(ApiError, match=message) as caught:
            chat(**{field: value})
        assert (caught.value.status, caught.value.body["error"]["type"]) == (400, "invalid_request_error"), field


def test_a_value_of_another_type_is_refused_whether_it_is_true_or_false() -> None:
    flags = ("stream", "logprobs", "parallel_tool_calls", "return_token_ids", "return_tokens_as_token_ids")
    numbers = ("n", "temperature", "top_p", "top_k", "top_logprobs", "max_tokens", "min_p", "repetition_penalty")
    rows: list[tuple[str, object]] = [(name, value) for name in flags for value in ("no", "", 0, 1, 1.0, [], {})]
    rows += [(name, value) for name in numbers for value in ("1", "", True, False, [], {})]
    rows += [(name, value) for name in ("stream_options", "chat_template_kwargs") for value in ("", 0, False, [])]
    rows += [("stream_options", {"include_usage": value}) for value in ("no", "", 0, 1, [])]
    rows += [("tools", value) for value in ("", 0, False, {})] + [("stop", value) for value in (0, False, {}, True)]
    rows += [("messages", [{"role": "assistant", "tool_calls": value}]) for value in ("", 0, False, {})]
    rows += [("tool_choice", value) for value in ("", False, [], {})]
    for name, value in rows:
        for ignore in (False, True):
            ignored: tuple[str, ...] = ()
            try:
                ignored = parse_chat({"messages": MESSAGES, name: value}, SAMPLING, ignore=ignore).ignored
            except ApiError as refused:
                assert refused.status == 400 and refused.param is not None and name in refused.param, (name, value)
            else:
                assert ignore and ignored == (name,), (name, value)
        assert chat(**{name: None} if name != "messages" else {}).parallel_tool_calls, name
    for value in ("message.output_text.logprobs", 5, {}):
        with pytest.raises(ApiError, match=r"include is .*, expected a list of texts"):
            as_chat({"input": "x", "include": value})
    with pytest.raises(ApiError, match=r"metrics is '', expected an object"):
        parse_finish(b'{"reward": 1, "metrics": ""}')


def test_the_parts_of_a_json_text_are_counted_without_parsing_it(monkeypatch) -> None:
    rows: list[tuple[Any, int]] = [
        ({}, 1), ([1, 2.5, None, True], 1), ("a, {b}: [c]", 1), ({"a": {"b": []}}, 5), ({"k": "\\"}, 3),
        ({"\\": '"', '\\\\"': ['\\"[{', "\u4e2d"]}, 7), ([[]] * 200_000, 200_001),
    ]  # fmt: skip
    for value, expected in rows:
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            assert num_parts(text.encode()) == expected, text[:100]
    keys, items = {f"k{n}": 1 for n in range(140_000)}, ["a"] * 140_000
    function = {"name": "f", "parameters": {"properties": keys}}
    bodies = [
        {"tools": [{"function": function}]}, {"logit_bias": keys}, {"stop": items}, {"metadata": keys}, keys,
        {"response_format": {"json_schema": keys}}, {"messages": [{"role": "user", "content": items}]},
        {"tools": [{"function": {"parameters": {"enum": [[]] * 140_000}}}]},
    ]  # fmt: skip
    calling = {"function": {"name": "f", "arguments": json.dumps(keys)}}
    parse_json(json.dumps({"messages": ["a b," * 500_000], "ids": [1] * 500_000}).encode())
    with monkeypatch.context() as patched:
        patched.setattr(msgspec.json, "decode", None)
        for body in bodies:
            with pytest.raises(ApiError, match="the body has more than 131,072 texts") as caught:
                parse_json(json.dumps({"messages": MESSAGES} | body).encode())
            assert (caught.value.status, caught.value.code) == (400, "too_many_parts")
    with pytest.raises(ApiError, match=r"messages\[1\].tool_calls: arguments has more than 131,072 texts"):
        chat(messages=[*MESSAGES, {"role": "assistant", "tool_calls": [calling]}])


def test_a_run_that_ignores_what_it_does_not_support_names_what_it_ignored() -> None:
    fields = {"temperature": 0.1, "tool_choice": "required", "response_format": {"type": "json_object"}, "odd": 1}
    request = parse_chat({"messages": MESSAGES, "tools": [TOOL], "top_p": 1, **fields}, SAMPLING, ignore=True)
    assert request.ignored == ("temperature", "tool_choice", "response_format", "odd") and request.use_tools
    for wrong in ({"n": 2}, {"max_tokens": 0}, {"messages": []}, {"stop": 3}):
        with pytest.raises(ApiError):
            parse_chat({"messages": MESSAGES, **wrong}, SAMPLING, ignore=True)


def test_tools_that_are_no_functions_are_refused_or_ignored_by_their_type() -> None:
    """As Codex sends them by the Responses API."""
    others = [{"type": "web_search"}, {"type": "custom", "name": "patch", "format": {"type": "grammar"}}]
    function = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    document = {"input": "x", "tools": [others[0], function, others[1]], "client_metadata": {"originator": "codex"}}
    asked = parse_chat(as_chat(document), SAMPLING, ignore=True)
    assert [tool["function"]["name"] for tool in asked.tools] == ["add"]
    assert asked.ignored == ("tools: web_search", "tools: custom")
    with pytest.raises(ApiError, match=r"tools\[0\] is .*web_search.*, expected a function"):
        parse_chat(as_chat(document), SAMPLING)
    assert parse_chat(as_chat(document | {"tools": [function]}), SAMPLING).ignored == ()
    with pytest.raises(ApiError, match=r"tools\[0\].function.name is 3, expected text"):
        parse_chat({"messages": MESSAGES, "tools": [{"function": {"name": 3}}]}, SAMPLING, ignore=True)


def test_every_name_of_the_limit_counts_and_stop_strings_come_alone_or_as_a_list() -> None:
    assert chat(max_tokens=None, max_completion_tokens=None, max_output_tokens=None).max_tokens is None
    assert chat(max_tokens=None, max_output_tokens=7).max_tokens == 7
    assert chat(max_tokens=9, max_completion_tokens=8).max_tokens == 8
    assert [chat(stop=stop).stop for stop in (None, "", [], "a", ["a", "b"])] == [(), (), (), ("a",), ("a", "b")]


def test_a_reward_comes_alone_or_with_what_it_is_made_of() -> None:
    assert parse_finish(b"0.5").value == 0.5
    reward = parse_finish(json.dumps({"reward": 1, "metrics": {"exact": 1, "steps": 4.5}}).encode())
    assert reward.value == 1.0 and reward.parts == {"exact": 1.0, "steps": 4.5}


def test_a_reward_that_no_trainer_could_use_is_refused_by_field_value_and_limit() -> None:
    def made_of(**metrics: object) -> bytes:
        return json.dumps({"reward": 1, "metrics": metrics}).encode()

    for body, message in [
        (b"", "the body is not JSON"),
        (b"null", "reward is None, expected a number"),
        (b'"1"', "reward is '1', expected a number"),
        (b"true", "reward is True, expected a number"),
        (b"{}", "reward is None, expected a number"),
        (b"1e400", "the body is not JSON"),
        (b"1e308", "reward is 1e+308, expected a number from -1e+09 to 1e+09"),
        (b'{"reward": 1, "note": 2}', "'note': unknown field, expected reward and metrics"),
        (b'{"reward": 1, "metrics": 3}', "metrics is 3, expected an object of numbers"),
        (made_of(a=None), "metrics.a is None, expected a number from -1e+09 to 1e+09"),
        (made_of(a=-1e10), "metrics.a is -10000000000.0, expected a number from -1e+09 to 1e+09"),
        (made_of(**{"a" * 65: 1}), f"metrics has the name '{'a' * 64}' of 65 characters, expected 1 to 64 printable"),
        (made_of(**{"": 1}), "metrics has the name '' of 0 characters"),
        (made_of(**{"a\nb": 1}), r"metrics has the name 'a\nb' of 3 characters, expected 1 to 64 printable ones"),
        (made_of(**dict.fromkeys(map(str, range(33)), 1)), "metrics has 33 names, expected at most 32"),
    ]:
        with pytest.raises(ApiError) as caught:
            parse_finish(body)
        assert caught.value.status == 400 and caught.value.message.startswith(message), body


def test_a_body_that_is_no_object_is_refused_and_half_of_a_surrogate_pair_is_called_that() -> None:
    for body in (b"", b"{", b"[1]", b"\xff", b'"text"', b'{"reward": "\\ud83d"'):
        with pytest.raises(ApiError) as caught:
            parse_json(body)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json") and "surrogate" not in str(
            caught.value
        )
    for half, parse in (("\\ud83d", parse_finish), ("\\udc00", parse_json)):
        with pytest.raises(ApiError) as caught:
            parse(f'{{"messages": "x{half}y"}}'.encode())
        expected = f"the body holds '{half.lower()}' without its other half, a lone surrogate; expected text that UTF-8"
        assert caught.value.message.startswith(expected) and caught.value.code == "invalid_json"


def test_every_way_to_say_the_run_s_top_k_is_accepted_and_another_top_k_is_refused() -> None:
    for run, asked in [(50, 50), (0, -1), (-1, 0), (0, 0)]:
        parse_chat({"messages": MESSAGES, "top_k": asked}, SamplingSettings(top_k=run))
    for run, asked in [(50, 0), (50, -1), (0, 50), (-1, 50)]:
        with pytest.raises(ApiError, match=f"top_k is {asked}, expected {run}, as the run samples"):
            parse_chat({"messages": MESSAGES, "top_k": asked}, SamplingSettings(top_k=run))


def test_what_is_done_to_the_list_of_messages_later_is_none_of_the_request_s() -> None:
    messages = [{"role": "user", "content": "x"}]
    request = parse_chat({"messages": messages}, SamplingSettings())
    messages.append({"role": "assistant", "content": "y"})
    assert request.messages == [{"role": "user", "content": "x"}]
