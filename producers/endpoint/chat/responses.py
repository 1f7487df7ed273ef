"""OpenAI's Responses API as a translation onto chat completions: requests into theirs, answers out of theirs.

The items of one answer (reasoning, text, calls) are one message of the assistant. Nothing is stored: each request
carries its whole conversation.
"""

from typing import Any

from penstock.producers.endpoint.chat.errors import bad_request
from penstock.producers.endpoint.chat.messages import text_of
from penstock.producers.endpoint.chat.requests import check_message, objects, shown
from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS

Json = dict[str, Any]

_ELSEWHERE = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that refer to what a server stores."""
_LOGPROBS = "message.output_text.logprobs"
ITEM_TYPES = {"reasoning": "reasoning", "content": "message"}
"""The parts of a message that are text, and the items that they become."""
PARTS = {item: part for part, item in ITEM_TYPES.items()}


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
    include = asked.pop("include", None)
    if include is not None and not isinstance(include, list):
        raise bad_request(f"include is {shown(include)}, expected a list of texts", "include")
    asked |= {"messages": messages, "logprobs": _LOGPROBS in (include or ())}
    asked["tools"] = [_tool(tool) for tool in objects(asked.get("tools"), "tools")]
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
    message, name = choice["message"], response_name(finished["id"])
    status = "incomplete" if choice["finish_reason"] == "length" else "completed"
    output: list[Json] = []
    if message.get("reasoning"):
        output.append(text_item("reasoning", name, message["reasoning"]))
    calls = message.get("tool_calls", ())
    if message["content"] or not (output or calls):
        output.append(text_item("content", name, message["content"] or ""))
        if choice["logprobs"]:
            output[-1]["content"][0]["logprobs"] = choice["logprobs"]["content"]
    for n, call in enumerate(calls):
        output.append({"type": "function_call", "id": f"fc_{name}_{n}", "call_id": call["id"], **call["function"]})
    for item in output:
        item["status"] = status
    output[-1] |= {field: message[field] for field in TOKEN_FIELDS}
    return begun_response(document, finished["id"], finished["created"], finished["model"]) | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def begun_response(document: Json, completion_id: str, created: int, model: str) -> Json:
    """Returns the response to `document` before anything is sampled."""
    return {
        "id": f"resp_{response_name(completion_id)}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": document.get("instructions"),
        "metadata": document.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": document.get("parallel_tool_calls") is not False,
        "tool_choice": "none" if document.get("tool_choice") == "none" else "auto",
        "tools": document.get("tools") or [],
        "max_output_tokens": document.get("max_output_tokens"),
        "previous_response_id": None,
        "usage": None,
    }


def response_name(completion_id: str) -> str:
    """Returns what the ids of a response and its items have in common."""
    return completion_id.removeprefix("chatcmpl-")


def text_item(part: str, name: str, text: str) -> Json:
    """Returns the item for a part of a message, `reasoning` or `content`."""
    if part == "reasoning":
        content = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content}
    said = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "content": [said]}


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
