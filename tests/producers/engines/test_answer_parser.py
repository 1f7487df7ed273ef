"""vLLM's own parsers, without an engine: an answer's text is split as vLLM's server would."""

import json
import warnings

import pytest

from chat_templates import encode, tokenizer_of
from penstock.producers.endpoint.chat.answers import Answers
from penstock.producers.endpoint.chat.requests import parse_chat
from penstock.producers.interfaces import Completion
from penstock.schemas.config import ConfigError, EndpointConfig
from penstock.schemas.rollout import SamplingSettings
from scripted_engine import completion_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"arguments":{"a":3,"b":4},"name":"add"}</tool_call>'


@pytest.fixture(scope="module")
def parser():
    with warnings.catch_warnings(action="ignore"):
        from penstock.producers.engines.answer_parser import VllmAnswerParser
    return lambda **names: VllmAnswerParser(tokenizer_of("qwen3"), EndpointConfig(**names), {})


def answer_of(text: str) -> Completion:
    """Returns an answer that ends its turn."""
    return completion_of(encode("qwen3", text + "<|im_end|>"))


def message_of(parser, text: str, **fields: object) -> dict:
    completion = answer_of(text)
    request = parse_chat({"messages": [{"role": "user", "content": "x"}], **fields}, SamplingSettings())
    return Answers(tokenizer_of("qwen3"), parser).message(request, [1, 2], completion)


def test_calls_and_reasoning_are_found(parser) -> None:
    both = parser(tool_parser="hermes", reasoning_parser="qwen3")
    message = message_of(both, f"<think>\nthree and four\n</think>\n\nthe tool says so{CALL}", tools=TOOLS)
    assert message["reasoning"].strip() == "three and four"
    assert message["content"].strip() == "the tool says so"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]) == {"a": 3, "b": 4}
    for _ in range(2):  # one answer does not reach into the next
        message = message_of(both, "<think>\na\n</think>\n\n" + CALL + CALL, tools=TOOLS)
        assert message["content"] is None and len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_call_without_tools_or_a_broken_one_stays_in_the_text(parser) -> None:
    tools_only = parser(tool_parser="hermes")
    for text, fields in (
        (CALL, {}),
        (CALL, {"tools": TOOLS, "tool_choice": "none"}),
        ('<tool_call>{"name": "add", </tool_call>', {"tools": TOOLS}),
    ):
        message = message_of(tools_only, text, **fields)
        assert message["content"] == text and "tool_calls" not in message


def test_a_parser_that_vllm_does_not_have_is_refused_with_its_field(parser) -> None:
    for field in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"endpoint.{field} = 'no-such': .*expected names of vLLM's parsers"):
            parser(**{field: "no-such"})


@pytest.mark.parametrize(
    "names",
    [
        {"tool_parser": "hermes", "reasoning_parser": "qwen3"},
        {"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"},
        {"tool_parser": "xlam"},
        {"tool_parser": "pythonic"},
        {"reasoning_parser": "granite"},
    ],
    ids=str,
)
def test_what_is_streamed_begins_what_the_parser_finds_in_the_end(parser, names) -> None:
    made, tokenizer = parser(**names), tokenizer_of("qwen3")
    for text in (
        "<think>\nthree and four\n</think>\n\nthe tool says so",
        f"<think>\nthree [a] < 4\n</think>\n\nlet me see {CALL}",
        "the answer is seven because {three} plus [four] makes seven",
        '{"name": "add", "parameters": {"a": 3}}',
        "[add(a=3, b=4)]",
        "Here is my thought process: three and four. Here is my response: seven",
        "three and four </think> seven",
    ):
        for tools in ({}, {"tools": TOOLS}):
            whole = answer_of(text)
            request = parse_chat({"messages": [{"role": "user", "content": "x"}], **tools}, SamplingSettings())
            answers = Answers(tokenizer, made, finds_reasoning="reasoning_parser" in names)
            message = answers.message(request, [1, 2], whole)
            for n in range(whole.num_tokens + 1):
                for part, said in answers.so_far(request, [1, 2], whole.part(0, n)).items():
                    assert (message.get(part) or "").startswith(said), (text, tools, n, part)
