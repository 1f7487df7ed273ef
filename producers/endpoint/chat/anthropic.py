"""Anthropic's Messages API as a translation onto chat completions: requests into theirs, answers and errors out of
theirs.

The blocks of one answer (thinking, text, calls) are one message of the assistant, and each result of a tool is a
message of its own.
"""

from typing import Any

import msgspec

from penstock.producers.endpoint.chat.errors import ApiError, bad_request
from penstock.producers.endpoint.chat.messages import images_of, text_of
from penstock.producers.endpoint.chat.requests import check_message, checked_object, objects
from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS

Json = dict[str, Any]

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_WITHOUT_EFFECT = ("cache_control", "inference_geo")
"""Fields that change no token."""
_UNPARSED = "INVALID_JSON"
"""The key under which a call whose arguments are no JSON object gives their text: that of Anthropic's documentation."""
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


def as_chat(document: Json) -> Json:
    """Returns the request for a chat completion that asks for the same.

    Raises:
        ApiError: 400, names the field, its value and what was expected.
    """
    asked = {name: value for name, value in document.items() if name not in _WITHOUT_EFFECT}
    given, system = objects(asked.pop("messages", None), "messages", at_least=1), asked.pop("system", None)
    if given[-1].get("role") == "assistant":
        raise bad_request("the last message is the assistant's, which is not continued; expected a user's", "messages")
    messages = [message for n, each in enumerate(given) for message in _messages(each, f"messages[{n}]")]
    if system:
        messages.insert(0, {"role": "system", "content": system})
        check_message(messages[0], "system")
    asked |= {"messages": messages, "tools": [_tool(tool) for tool in objects(asked.get("tools"), "tools")]}
    asked["stop"] = asked.pop("stop_sequences", None)
    choice = dict(checked_object(asked.pop("tool_choice", None), "tool_choice", "an object"))
    if choice.pop("disable_parallel_tool_use", None):
        asked["parallel_tool_calls"] = False
    if choice:  # one that forces a call is left for its check
        asked["tool_choice"] = choice["type"] if choice.get("type") in ("auto", "none") else choice
    if isinstance(thinking := asked.get("thinking"), dict) and thinking.get("type") in ("adaptive", "disabled"):
        del asked["thinking"]  # the model decides, as without it
    return asked


def as_message(finished: Json) -> Json:
    """Returns a finished chat completion as a message of Anthropic's."""
    (choice,) = finished["choices"]
    message, stop = choice["message"], choice["stop_reason"]
    content: list[Json] = []
    if message.get("reasoning"):
        content.append(text_block("reasoning", finished["id"], message["reasoning"]))
    calls = message.get("tool_calls", ())
    if message["content"] or not (content or calls):
        content.append(text_block("content", finished["id"], message["content"] or ""))
    for call in calls:
        arguments = _arguments(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    usage = finished["usage"]
    return begun_message(finished["id"], finished["model"], usage["prompt_tokens"], usage["completion_tokens"]) | {
        "content": content,
        "stop_reason": _STOPS.get(choice["finish_reason"], "end_turn" if stop is None else "stop_sequence"),
        "stop_sequence": stop,
        **{name: message[name] for name in TOKEN_FIELDS},
    }


def begun_message(completion_id: str, model: str, num_prompt: int, num_sampled: int = 0) -> Json:
    """Returns the answer before anything is sampled."""
    return {
        "id": f"msg_{completion_id.removeprefix('chatcmpl-')}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": num_sampled,
        },
    }


def text_block(part: str, completion_id: str, text: str) -> Json:
    """Returns the block for a part of a message, `reasoning` or `content`. Clients leave out thinking without a
    signature, so it has one, which says nothing."""
    if part == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": completion_id}
    return {"type": "text", "text": text}


def error_body(error: ApiError) -> Json:
    """Returns an error in Anthropic's shape, with the `code` and `param` that it has in OpenAI's."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": error.body["error"] | {"type": kind}}


def _messages(message: Json, where: str) -> list[Json]:
    content, fields = message.get("content"), {name: message[name] for name in TOKEN_FIELDS if name in message}
    if not isinstance(content, list):
        messages = [message]
    elif message.get("role") == "assistant":
        messages = [{"role": "assistant", **_turn(objects(content, f"{where}.content")), **fields}]
    else:
        messages = []
        for n, block in enumerate(objects(content, f"{where}.content")):
            if block.get("type") == "tool_result":
                result = _result(block, f"{where}.content[{n}]")
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
            elif messages and messages[-1]["role"] != "tool":
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": message.get("role"), "content": [block], **fields})
    for each in messages:
        check_message(each, where)
    return messages


def _turn(blocks: list[Json]) -> Json:
    """Returns what a message of the assistant holds. Redacted thinking is another model's, and left out."""
    turn: Json = {"content": []}
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            made = block.get("input")
            arguments = made[_UNPARSED] if isinstance(made, dict) and list(made) == [_UNPARSED] else made
            function = {"name": block.get("name"), "arguments": arguments}
            turn.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            turn["reasoning"] = turn.get("reasoning", "") + str(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            turn["content"].append(block)
    return turn


def _result(block: Json, where: str) -> Any:
    """Returns the content of a tool's result; that of an error begins with the word, since templates do not render
    the flag."""
    content = block.get("content")
    check_message({"role": "tool", "content": content}, where)
    if block.get("is_error") is True and isinstance(content, list) and images_of([{"content": content}]):
        return [{"type": "text", "text": "error: "}, *content]
    if block.get("is_error") is True and "error" not in text_of(content).lower():
        return f"error: {text_of(content)}"
    return content


def _tool(tool: Json) -> Json:
    kind = tool.get("type") or "custom"
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    if tool.get("input_schema") is not None:
        function["parameters"] = tool["input_schema"]
    return {"type": "function" if kind == "custom" else kind, "function": function}


def _arguments(text: str) -> Json:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {_UNPARSED: text}
