"""Requests for chat completions, checked field by field.

Tokens must be sampled from the distribution that the run records, otherwise the trainer would mistake the logprobs of
one policy for those of another. So a request may shorten an answer, but not change how it is sampled.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from penstock.producers.endpoint.chat.errors import bad_request
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import MAX_REWARD, SamplingSettings, check_part_names, one_line

Json = dict[str, Any]

_IGNORED = frozenset({
    "model", "user", "metadata", "store", "seed", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "verbosity", "include_reasoning", "return_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "priority", "request_id",
})  # fmt: skip
"""Fields that do not affect the tokens' distribution and are ignored."""


_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip
"""Names that transformers would take for arguments of its own."""


class ChatRequest(NamedTuple):
    """A valid request. max_tokens: the most tokens of the answer; None without a limit."""

    messages: list[Json]
    tools: list[Json]
    use_tools: bool
    parallel_tool_calls: bool
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    template_arguments: Json


def parse_json(body: bytes) -> Json:
    """Raises ApiError 400 for anything but a JSON object."""
    value = _decoded(body)
    if not isinstance(value, dict):
        raise bad_request(f"the body is {_kind(value)}, expected a JSON object", code="invalid_json")
    return value


def parse_finish(body: bytes) -> Reward:
    """`{"reward": 1.0, "metrics": {"exact": 1.0}}`, or the reward alone.

    Raises:
        ApiError: 400, names the field, its value and what was expected.
    """
    value = _decoded(body)
    document = value if isinstance(value, dict) else {"reward": value}
    if unknown := set(document) - {"reward", "metrics"}:
        raise bad_request(f"{min(unknown)!r}: unknown field, expected reward and metrics", min(unknown))
    metrics = document.get("metrics") or {}
    if not isinstance(metrics, dict):
        raise bad_request(f"metrics is {_kind(metrics)}, expected an object of numbers", "metrics")
    try:
        check_part_names(metrics, "metrics")
    except ValueError as error:
        raise bad_request(str(error), "metrics") from None
    return Reward(
        value=_number(document.get("reward"), "reward"),
        parts={name: _number(number, f"metrics.{name}") for name, number in metrics.items()},
    )


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        why = _lone_surrogate(body) or f"the body is not JSON: {error}"
        raise bad_request(why, code="invalid_json") from None


def _lone_surrogate(body: bytes) -> str:
    """Says where a body holds half of a surrogate pair, which msgspec takes for the end of the body; empty if none."""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        return f"the body holds {found!a} without its other half, a lone surrogate; expected text that UTF-8 can encode"
    except (ValueError, RecursionError):
        pass
    return ""


def parse_chat(document: Json, sampling: SamplingSettings) -> ChatRequest:
    """A chat completion's request, against how the run samples.

    Raises:
        ApiError: 400, names the field, its value and what was expected.
    """
    left = {name: value for name, value in document.items() if name not in _IGNORED}
    take = left.pop
    messages = _objects(take("messages", None), "messages", at_least=1)
    for n, message in enumerate(messages):
        _check_message(message, f"messages[{n}]")
    tools = _objects(take("tools", None) or [], "tools")
    for n, tool in enumerate(tools):
        _check_tool(tool, f"tools[{n}]")
    choice = take("tool_choice", None)
    if choice not in (None, "auto", "none"):
        raise bad_request(
            f"tool_choice is {_shown(choice)}: to force a call constrains sampling; expected 'auto' or 'none'",
            "tool_choice",
        )
    stream_options = take("stream_options", None) or {}
    if not isinstance(stream_options, dict):
        raise bad_request(f"stream_options is {_kind(stream_options)}, expected an object", "stream_options")
    template_arguments = take("chat_template_kwargs", None) or {}
    if not isinstance(template_arguments, dict) or _RESERVED & set(template_arguments):
        raise bad_request(
            f"chat_template_kwargs is {_shown(template_arguments)}, expected an object of the template's own variables",
            "chat_template_kwargs",
        )
    request = ChatRequest(
        messages=list(messages),  # an environment may change its own list while the answer is sampled
        tools=list(tools),
        use_tools=bool(tools) and choice != "none",
        parallel_tool_calls=take("parallel_tool_calls", None) is not False,
        max_tokens=_limit(take("max_completion_tokens", None), take("max_tokens", None)),
        stream=_flag(take("stream", None), "stream"),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=_flag(take("logprobs", None), "logprobs"),
        template_arguments=template_arguments,
    )
    _check_sampling(left, sampling)
    return request


def _check_sampling(left: Json, sampling: SamplingSettings) -> None:
    """Checks that every remaining field has the value that the run samples with anyway."""
    fixed: dict[str, tuple[Callable[[Any], bool], str]] = {
        "n": (lambda value: value == 1, "1: siblings are rollouts of their own"),
        "temperature": (_equals(sampling.temperature), f"{sampling.temperature:g}, as the run samples"),
        "top_p": (_equals(sampling.top_p), f"{sampling.top_p:g}, as the run samples"),
        "top_k": (_keeps_as_many(sampling.top_k), f"{sampling.top_k}, as the run samples"),
        "min_p": (_equals(0), "0"),
        "min_tokens": (_equals(0), "0"),
        "presence_penalty": (_equals(0), "0"),
        "frequency_penalty": (_equals(0), "0"),
        "repetition_penalty": (_equals(1), "1"),
        "top_logprobs": (_equals(0), "0: the logprob of the sampled token is all there is"),
        "stop": (lambda value: value == [] or value == "", "none: the run's stop tokens end an answer"),
        "response_format": (lambda value: value == {"type": "text"}, "{'type': 'text'}"),
    }
    for name, value in left.items():
        if value is None or value is False or (isinstance(value, list | dict) and not value):
            continue
        if name not in fixed:
            raise bad_request(
                f"{name} is {_shown(value)}: not supported; expected it to be left out", name, "unsupported_parameter"
            )
        holds, expected = fixed[name]
        if not holds(value):
            raise bad_request(f"{name} is {_shown(value)}, expected {expected}", name, "unsupported_value")


def _check_message(message: Json, where: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role is {_shown(role)}, expected a role of the chat template", where)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and isinstance(part.get("text", part.get("refusal")), str)):
                raise bad_request(f"{where}.content holds {_shown(part)}, expected parts of text", where)
    elif content is not None and not isinstance(content, str):
        raise bad_request(f"{where}.content is {_kind(content)}, expected text", where)
    for call in _objects(message.get("tool_calls") or [], f"{where}.tool_calls"):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.tool_calls holds {_shown(call)}, expected calls of functions", where)


def _check_tool(tool: Json, where: str) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise bad_request(f"{where} is {_shown(tool)}, expected a function", where)
    for name, kind, optional in (("name", str, False), ("description", str, True), ("parameters", dict, True)):
        value = function.get(name)
        if not (isinstance(value, kind) or (optional and value is None)):
            expected = "an object" if kind is dict else "text"
            raise bad_request(f"{where}.function.{name} is {_shown(value)}, expected {expected}", where)


def _objects(value: Any, name: str, at_least: int = 0) -> list[Json]:
    if not isinstance(value, list) or len(value) < at_least or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{name} is {_shown(value)}, expected a list of objects", name)
    return value


def _limit(*values: Any) -> int | None:
    limits = [value for value in values if value is not None]
    for value in limits:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_request(f"max_completion_tokens is {_shown(value)}, expected 1 or more", "max_completion_tokens")
    return min(limits, default=None)


def _flag(value: Any, name: str) -> bool:
    if value not in (None, True, False):
        raise bad_request(f"{name} is {_shown(value)}, expected true or false", name)
    return bool(value)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        expected = f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        raise bad_request(f"{name} is {_shown(value)}, expected {expected}", name)
    return float(value)


def _keeps_as_many(top_k: int) -> Callable[[Any], bool]:
    every = (0, -1)
    return lambda value: value == top_k or (value in every and top_k in every)


def _equals(expected: float) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == expected

    return holds


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    return one_line(repr(value)[:200])
