"""An agent's messages: their identity, and the form that chat templates expect."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS

Json = dict[str, Any]

CALL_ID_LENGTH = 9
"""Letters and digits of a call's id: Mistral's templates refuse any other form."""
CALL_ID = re.compile(rf"\b[A-Za-z0-9]{{{CALL_ID_LENGTH}}}\b")

_SURROGATE = re.compile(r"\\u[dD]|[\ud800-\udfff]")


def extend_chain(key: bytes, canonical: bytes) -> bytes:
    """Returns the key of a conversation that one message extends. key: of the conversation before; empty at first."""
    return hashlib.blake2b(key + canonical, digest_size=16).digest()


def canonical_form(message: Mapping[str, Any]) -> bytes:
    """Returns what identifies a message: role, content and parsed tool calls.

    Clients drop fields they do not know (reasoning, token ids), and frameworks write a call's arguments with their own
    spacing and trim an answer's white space.
    """
    role, text = message["role"], text_of(message.get("content"))
    calls = [
        [call["function"]["name"], _arguments(call["function"].get("arguments"))]
        for call in message.get("tool_calls") or ()
    ]
    said = [role, text.strip() if role == "assistant" else text, calls]
    return json.dumps(said, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")


def text_of(content: Any) -> str:
    """Returns the text of a checked message's content: text, parts, or nothing. An image is its digest."""
    if isinstance(content, list):
        return "".join(part.get("text", part.get("refusal", part.get("image", ""))) for part in content)
    return content or ""


def images_of(messages: Sequence[Json]) -> list[str]:
    """Returns the digests of the images in checked messages, in order."""
    parts = [part for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return [part["image"] for part in parts if part.get("type") == "image"]


def for_template(messages: Sequence[Json]) -> list[Json]:
    """Returns messages with tool calls' arguments as objects and text as content, or parts if there are images, without
    the token fields.

    Reasoning is given under both of its names: templates and clients differ.
    """
    return [_for_template(message) for message in messages]


def _for_template(message: Json) -> Json:
    rendered = {name: value for name, value in message.items() if name not in TOKEN_FIELDS and value is not None}
    rendered["content"] = text_of(message.get("content"))
    if images_of([message]):
        rendered["content"] = [
            {"type": "image"} if part.get("type") == "image" else {"type": "text", "text": text_of([part])}
            for part in message["content"]
        ]
    if message["role"] == "developer":
        rendered["role"] = "system"
    if calls := rendered.pop("tool_calls", None):
        rendered["tool_calls"] = [_call_for_template(call) for call in calls]
    reasoning = rendered.pop("reasoning", None) or rendered.pop("reasoning_content", None)
    if reasoning:
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    return rendered


def _call_for_template(call: Json) -> Json:
    arguments = _arguments(_encodable(call["function"].get("arguments")))
    # An answer with invalid JSON stays in the history: refusing it here would end the conversation for good.
    function = call["function"] | {"arguments": arguments if isinstance(arguments, dict) else {}}
    return {"type": "function", **call, "function": function}


def _encodable(arguments: Any) -> Any:
    """Returns JSON text with question marks for halves of surrogate pairs, which no tokenizer takes."""
    if not isinstance(arguments, str) or not _SURROGATE.search(arguments):
        return arguments
    text = json.dumps(_arguments(arguments), ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _arguments(arguments: Any) -> Any:
    """Returns them parsed if they are JSON text, else unchanged."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
