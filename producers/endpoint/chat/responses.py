"""OpenAI's Responses API as a translation onto chat completions: requests into theirs, answers out of theirs.

The items of one answer (reasoning, text, calls) are one message of the assistant. Nothing is stored: each request
carries its whole conversation.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from penstock.producers.endpoint.chat.answers import event
from penstock.producers.endpoint.chat.errors import bad_request
from penstock.producers.endpoint.chat.messages import text_of
from penstock.producers.endpoint.chat.requests import check_message, objects, shown
from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS

Json = dict[str, Any]

_ELSEWHERE = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that refer to what a server stores."""
_LOGPROBS = "message.output_text.logprobs"


def as_chat(document: Json) -> Json:
    """Returns the request for a chat completion that asks for the same.

    Raises:
        ApiError: 400, names the field, its value and what was expected.
    """
    asked = dict(document)
    for name in _ELSEWHERE:
        if value := asked.pop(name, None):
            raise bad_request(
                f"{name} is {shown(value)}: responses are not stored; expected the whole conversation in input", name
            )
    given, instructions = asked.pop("input", None), asked.pop("instructions", None)
    items = objects([{"role": "user", "content": given}] if isinstance(given, str) else given, "input", at_least=1)
    messages = _messages(items)
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
        check_message(messages[0], "instructions")
    include = asked.pop("include", None) or ()
    asked |= {"messages": messages, "logprobs": _LOGPROBS in include}
    asked["tools"] = [_tool(tool) for tool in objects(asked.get("tools") or [], "tools")]
    # What follows changes no token, or is left in `asked` for its check.
    asked.pop("max_tool_calls", None)
    if asked.get("truncation") == "disabled":
        del asked["truncation"]
    for name, harmless in (("text", ("verbosity",)), ("reasoning", ("summary", "generate_summary"))):
        if isinstance(options := asked.get(name), dict):
            left = {key: value for key, value in options.items() if key not in harmless and value is not None}
            asked[name] = {key: value for key, value in left.items() if value != {"type": "text"}}
    return asked


def as_response(document: Json, finished: Json) -> Json:
    """Returns a finished chat completion as the response to `document`. The token details that clients expect are not
    counted: they are 0."""
    (choice,), usage = finished["choices"], finished["usage"]
    message, name = choice["message"], finished["id"].removeprefix("chatcmpl-")
    status = "incomplete" if choice["finish_reason"] == "length" else "completed"
    output: list[Json] = []
    if message.get("reasoning"):
        content = [{"type": "reasoning_text", "text": message["reasoning"]}]
        output.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    calls = message.get("tool_calls", ())
    if message["content"] or not (output or calls):
        logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
        text = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": logprobs}
        output.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [text]})
    for n, call in enumerate(calls):
        output.append({"type": "function_call", "id": f"fc_{name}_{n}", "call_id": call["id"], **call["function"]})
    for item in output:
        item["status"] = status
    output[-1] |= {field: message[field] for field in TOKEN_FIELDS}
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": finished["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": document.get("instructions"),
        "metadata": document.get("metadata") or {},
        "model": finished["model"],
        "output": output,
        "parallel_tool_calls": document.get("parallel_tool_calls") is not False,
        "tool_choice": "none" if document.get("tool_choice") == "none" else "auto",
        "tools": document.get("tools") or [],
        "max_output_tokens": document.get("max_output_tokens"),
        "previous_response_id": None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def events(response: Json) -> Iterator[bytes]:
    """Yields a finished response as the server-sent events of a stream."""
    numbers = itertools.count()

    def made(kind: str, **fields: Any) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields})

    begun = response | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield made("created", response=begun)
    yield made("in_progress", response=begun)
    for n, item in enumerate(response["output"]):
        where = {"item_id": item["id"], "output_index": n}
        opened = {name: value for name, value in item.items() if name not in TOKEN_FIELDS} | {"status": "in_progress"}
        if item["type"] == "function_call":
            yield made("output_item.added", output_index=n, item=opened | {"arguments": ""})
            yield made("function_call_arguments.delta", **where, delta=item["arguments"])
            yield made("function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            where["content_index"] = 0
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield made("output_item.added", output_index=n, item=opened | {"content": []})
            yield made("content_part.added", **where, part=part | {"text": ""} | ({"logprobs": []} if logprobs else {}))
            yield made(f"{part['type']}.delta", **where, delta=part["text"], **logprobs)
            yield made(f"{part['type']}.done", **where, text=part["text"], **logprobs)
            yield made("content_part.done", **where, part=part)
        yield made("output_item.done", output_index=n, item=item)
    yield made(response["status"], response=response)


def _messages(items: list[Json]) -> list[Json]:
    messages: list[Json] = []
    for n, item in enumerate(items):
        where, kind = f"input[{n}]", item.get("type", "message")
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "message":
            _turn(messages, "content", "tool_calls")["content"] = item.get("content")
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            turn = _turn(messages, "reasoning", "content", "tool_calls")
            check_message({"role": "assistant", "content": parts}, where)
            turn["reasoning"] = text_of(parts)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(call)
        else:
            raise bad_request(
                f"{where}.type is {shown(kind)}, expected message, reasoning, function_call or function_call_output",
                "input",
            )
        messages[-1] |= {name: item[name] for name in TOKEN_FIELDS if name in item}
        check_message(messages[-1], where)
    return messages


def _turn(messages: list[Json], *later: str) -> Json:
    """Returns the assistant's message to which an item belongs: the last one, unless it is complete (its last item
    carries the token ids) or has a field of `later`, which come after such an item."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in (*later, *TOKEN_FIELDS)):
        messages.append({"role": "assistant"})
    return messages[-1]


def _tool(tool: Json) -> Json:
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": tool.get("type"), "function": function}
