"""Requests for chat completions, checked field by field.

Tokens must be sampled from the distribution that the run records, otherwise the trainer would mistake the logprobs of
one policy for those of another. So a request may shorten an answer (a limit, stop strings), but not change how it is
sampled.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.producers.endpoint.chat.errors import bad_request
from penstock.schemas.config import RESERVED_BY_TEMPLATES
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import MAX_REWARD, SamplingSettings, check_part_names, one_line

Json = dict[str, Any]

_IGNORED = frozenset({
    "model", "user", "metadata", "client_metadata", "store", "seed", "service_tier", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "verbosity", "include_reasoning", "skip_special_tokens",
    "spaces_between_special_tokens", "priority", "request_id",
})  # fmt: skip
"""Fields that do not affect the tokens' distribution and are ignored."""
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
"""The names under which clients limit an answer; the smallest counts."""


class ChatRequest(NamedTuple):
    """A valid request.

    max_tokens: the most tokens of the answer; None without a limit.
    stop: texts that end the answer.
    token_ids: whether the response carries vLLM's own fields of token ids.
    tokens_as_ids: whether logprobs name tokens by their ids, as vLLM does on demand.
    ignored: the fields without effect from which the client may expect one.
    ignores: whether such a request is answered; False refuses it.
    num_characters: the text in messages and tools.
    """

    messages: list[Json]
    tools: list[Json]
    use_tools: bool
    parallel_tool_calls: bool
    max_tokens: int | None
    stream: bool
    include_usage: bool
    logprobs: bool
    template_arguments: Json
    stop: tuple[str, ...]
    token_ids: bool
    tokens_as_ids: bool
    ignored: tuple[str, ...]
    ignores: bool
    num_characters: int


def parse_json(body: bytes) -> Json:
    """Raises ApiError 400 for anything but a JSON object."""
    value = _decoded(body)
    if not isinstance(value, dict):
        raise bad_request(f"the body is {_kind(value)}, expected a JSON object", code="invalid_json")
    return value


def parse_finish(body: bytes) -> Reward:
    """Parses `{"reward": 1.0, "metrics": {"exact": 1.0}}`, or the reward alone.

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
    """Returns the error of a body with half a surrogate pair, where msgspec reports a truncated body; else empty."""
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = error.object[error.start]
        return f"the body holds {found!a} without its other half, a lone surrogate; expected text that UTF-8 can encode"
    except (ValueError, RecursionError):
        pass
    return ""


def parse_chat(document: Json, sampling: SamplingSettings, *, ignore: bool = False) -> ChatRequest:
    """Parses a request for a chat completion, and checks it against the run's sampling.

    ignore: answer a request for other sampling as if it had not asked for it (`endpoint.unsupported`).

    Raises:
        ApiError: 400, names the field, its value and what was expected.
    """
    left = {name: value for name, value in document.items() if name not in _IGNORED}
    take = left.pop
    messages = objects(take("messages", None), "messages", at_least=1)
    for n, message in enumerate(messages):
        check_message(message, f"messages[{n}]")
    tools, ignored_tools = _functions(objects(take("tools", None) or [], "tools"), ignore)
    limits = {name: take(name, None) for name in _LIMITS}
    stream_options = take("stream_options", None) or {}
    if not isinstance(stream_options, dict):
        raise bad_request(f"stream_options is {_kind(stream_options)}, expected an object", "stream_options")
    template_arguments = take("chat_template_kwargs", None) or {}
    if not isinstance(template_arguments, dict) or RESERVED_BY_TEMPLATES & set(template_arguments):
        raise bad_request(
            f"chat_template_kwargs is {shown(template_arguments)}, expected an object of the template's own variables",
            "chat_template_kwargs",
        )
    return ChatRequest(
        messages=list(messages),  # an environment may change its own list while the answer is sampled
        tools=tools,
        use_tools=bool(tools) and left.get("tool_choice") != "none",
        parallel_tool_calls=take("parallel_tool_calls", None) is not False,
        max_tokens=_limit(limits),
        stream=_flag(take("stream", None), "stream"),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=_flag(take("logprobs", None), "logprobs"),
        template_arguments=template_arguments,
        stop=_stop(take("stop", None)),
        token_ids=_flag(take("return_token_ids", None), "return_token_ids"),
        tokens_as_ids=_flag(take("return_tokens_as_token_ids", None), "return_tokens_as_token_ids"),
        ignored=(*ignored_tools, *_check_sampling(left, sampling, ignore)),
        ignores=ignore,
        num_characters=_num_characters(messages) + _num_characters(tools),
    )


def _functions(tools: list[Json], ignore: bool) -> tuple[list[Json], list[str]]:
    """Returns the tools that are functions, and what names the others; those are ignored or refused."""
    functions, others = [], []
    for n, tool in enumerate(tools):
        if ignore and tool.get("type", "function") != "function":
            others.append(f"tools: {tool['type']}")
        else:
            _check_tool(tool, f"tools[{n}]")
            functions.append(tool)
    return functions, others


def _num_characters(value: Any) -> int:
    """Returns the length of all text in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_characters, value.values()))
    if isinstance(value, list) and value and not isinstance(value[0], int | float):  # a message's token ids are many
        return sum(map(_num_characters, value))
    return 0


def _check_sampling(left: Json, sampling: SamplingSettings, ignore: bool) -> tuple[str, ...]:
    """Checks that every remaining field has the value that the run samples with; returns those that have another one
    and are to be ignored."""
    ignored = []
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
        "stop_token_ids": (_same_ids(sampling.stop_token_ids), f"{list(sampling.stop_token_ids)}, as the run samples"),
        "tool_choice": (
            lambda value: value in ("auto", "none"),
            "'auto' or 'none': to force a call constrains sampling",
        ),
        "response_format": (lambda value: value == {"type": "text"}, "{'type': 'text'}"),
    }
    for name, value in left.items():
        if value is None or value is False or (isinstance(value, list | dict) and not value):
            continue
        holds, expected = fixed.get(name, (None, ""))
        if holds is not None and holds(value):
            continue
        if ignore and name != "n":  # a client that asks for several answers reads several
            ignored.append(name)
        elif holds is None:
            raise bad_request(
                f"{name} is {shown(value)}: not supported; expected it to be left out", name, "unsupported_parameter"
            )
        else:
            raise bad_request(f"{name} is {shown(value)}, expected {expected}", name, "unsupported_value")
    return tuple(ignored)


def check_message(message: Json, where: str) -> None:
    """Raises ApiError 400, named after `where`, for a message that no template could render."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role is {shown(role)}, expected a role of the chat template", where)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, dict) and isinstance(part.get("text", part.get("refusal")), str)):
                raise bad_request(f"{where}.content holds {shown(part)}, expected parts of text", where)
    elif content is not None and not isinstance(content, str):
        raise bad_request(f"{where}.content is {_kind(content)}, expected text", where)
    for call in objects(message.get("tool_calls") or [], f"{where}.tool_calls"):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.tool_calls holds {shown(call)}, expected calls of functions", where)


def _check_tool(tool: Json, where: str) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise bad_request(f"{where} is {shown(tool)}, expected a function", where)
    for name, kind, optional in (("name", str, False), ("description", str, True), ("parameters", dict, True)):
        value = function.get(name)
        if not (isinstance(value, kind) or (optional and value is None)):
            expected = "an object" if kind is dict else "text"
            raise bad_request(f"{where}.function.{name} is {shown(value)}, expected {expected}", where)


def objects(value: Any, name: str, at_least: int = 0) -> list[Json]:
    """Returns a list of at least so many JSON objects; raises ApiError 400 for anything else."""
    if not isinstance(value, list) or len(value) < at_least or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{name} is {shown(value)}, expected a list of objects", name)
    return value


def _limit(limits: Mapping[str, Any]) -> int | None:
    given = {name: value for name, value in limits.items() if value is not None}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise bad_request(f"{name} is {shown(value)}, expected 1 or more", name)
    return min(given.values(), default=None)


def _stop(value: Any) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(text, str) and text for text in texts):
        raise bad_request(f"stop is {shown(value)}, expected a text or a list of texts, none of them empty", "stop")
    return tuple(texts)


def _same_ids(expected: tuple[int, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and sorted(value, key=repr) == sorted(expected, key=repr)


def _flag(value: Any, name: str) -> bool:
    if value not in (None, True, False):
        raise bad_request(f"{name} is {shown(value)}, expected true or false", name)
    return bool(value)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        expected = f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        raise bad_request(f"{name} is {shown(value)}, expected {expected}", name)
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


def shown(value: Any) -> str:
    """Returns a value for an error's message: short, on one line."""
    return one_line(repr(value)[:200])
