"""Answers as server-sent events while they are sampled: the events of chat completions, of the Responses API and of
Anthropic's Messages API."""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from penstock.producers.endpoint.chat.anthropic import as_message, begun_message, error_body, text_block
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.producers.endpoint.chat.responses import (
    ITEM_TYPES,
    PARTS,
    as_response,
    begun_response,
    response_name,
    text_item,
)
from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS

Json = dict[str, Any]

_COMMENT = b": sampling\n\n"
_DONE = b"data: [DONE]\n\n"


class Events(Protocol):
    """The events of one answer: the beginning, more of its `reasoning` and then its `content`, and the end.

    keep_alive: what is sent while there is nothing to say, and clients ignore.
    """

    keep_alive: bytes

    def begin(self, prompt_ids: Sequence[int]) -> Iterator[bytes]: ...

    def more(self, part: str, text: str) -> Iterator[bytes]: ...

    def end(self, finished: Json) -> Iterator[bytes]:
        """Yields what is left once the chat completion is finished and all its text was in `more`."""
        ...

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """Yields the end of an answer that fails after its beginning."""
        ...


class ChatEvents:
    """The events of a chat completion."""

    keep_alive = _COMMENT

    def __init__(self, completion_id: str, model: str, request: ChatRequest) -> None:
        self._head = {"id": completion_id, "created": int(time.time()), "model": model}
        self._head["object"] = "chat.completion.chunk"
        self._request = request

    def begin(self, prompt_ids: Sequence[int]) -> Iterator[bytes]:
        ids = {"prompt_token_ids": list(prompt_ids)} if self._request.token_ids else {}
        yield self._chunk({"role": "assistant", "content": ""}, {}, ids)

    def more(self, part: str, text: str) -> Iterator[bytes]:
        yield self._chunk({part: text})

    def end(self, finished: Json) -> Iterator[bytes]:
        (choice,) = finished["choices"]
        message = choice["message"]
        if "tool_calls" in message:
            yield self._chunk({"tool_calls": [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]})
        last = {name: choice[name] for name in ("logprobs", "finish_reason", "token_ids") if name in choice}
        yield self._chunk({name: message[name] for name in TOKEN_FIELDS}, last)
        if self._request.include_usage:
            yield event(self._head | {"choices": [], "usage": finished["usage"]})
        yield _DONE

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body)

    def _chunk(self, delta: Json, choice: Json | None = None, fields: Json | None = None) -> bytes:
        shown = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | (choice or {})
        return event(self._head | (fields or {}) | {"choices": [shown]})


class ResponseEvents:
    """The events of a response to `document`. completion_id: of the chat completion that it is a translation of."""

    keep_alive = _COMMENT

    def __init__(self, completion_id: str, model: str, document: Json) -> None:
        self._document = document
        self._name = response_name(completion_id)
        self._begun = begun_response(document, completion_id, int(time.time()), model)
        self._numbers = itertools.count()
        self._open: list[Json] = []
        """The items of text that have begun; all but the last are complete."""

    def begin(self, prompt_ids: Sequence[int]) -> Iterator[bytes]:
        yield self._made("created", response=self._begun)
        yield self._made("in_progress", response=self._begun)

    def more(self, part: str, text: str) -> Iterator[bytes]:
        if not self._open or self._open[-1]["type"] != ITEM_TYPES[part]:
            if self._open:
                yield from self._close(self._open[-1] | {"status": "completed"})
            yield from self._begin(text_item(part, self._name, ""))
        (content,) = self._open[-1]["content"]
        content["text"] += text
        logprobs: Json = {"logprobs": []} if "logprobs" in content else {}
        yield self._made(f"{content['type']}.delta", **self._place, content_index=0, delta=text, **logprobs)

    def end(self, finished: Json) -> Iterator[bytes]:
        response = as_response(self._document, finished)
        for n, item in enumerate(response["output"]):
            if item["type"] == "function_call":
                where = {"item_id": item["id"], "output_index": n}
                opened = {name: value for name, value in item.items() if name not in TOKEN_FIELDS}
                opened |= {"status": "in_progress", "arguments": ""}
                yield self._made("output_item.added", output_index=n, item=opened)
                yield self._made("function_call_arguments.delta", **where, delta=item["arguments"])
                yield self._made(
                    "function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
                )
                yield self._made("output_item.done", output_index=n, item=item)
            elif n >= len(self._open) - 1:
                if n == len(self._open):  # an answer without text
                    yield from self._begin(item)
                yield from self._close(item)
        yield self._made(response["status"], response=response)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        body = error.body
        yield event({"type": "error", "sequence_number": next(self._numbers), **body["error"], **body})

    @property
    def _place(self) -> Json:
        return {"item_id": self._open[-1]["id"], "output_index": len(self._open) - 1}

    def _begin(self, item: Json) -> Iterator[bytes]:
        self._open.append(text_item(PARTS[item["type"]], self._name, "") | {"status": "in_progress"})
        (content,) = self._open[-1]["content"]
        yield self._made("output_item.added", output_index=len(self._open) - 1, item=self._open[-1] | {"content": []})
        yield self._made("content_part.added", **self._place, content_index=0, part=content)

    def _close(self, item: Json) -> Iterator[bytes]:
        (content,) = item["content"]
        logprobs = {"logprobs": content["logprobs"]} if "logprobs" in content else {}
        where = self._place | {"content_index": 0}
        yield self._made(f"{content['type']}.done", **where, text=content["text"], **logprobs)
        yield self._made("content_part.done", **where, part=content)
        yield self._made("output_item.done", output_index=where["output_index"], item=item)

    def _made(self, kind: str, **fields: Any) -> bytes:
        return event({"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields})


class MessageEvents:
    """The events of a message of Anthropic's. completion_id: of the chat completion that it is a translation of."""

    def __init__(self, completion_id: str, model: str) -> None:
        self.keep_alive = event({"type": "ping"})
        self._id, self._model = completion_id, model
        self._num_blocks = 0
        self._open = ""
        """The part of the message whose block has begun and not ended."""

    def begin(self, prompt_ids: Sequence[int]) -> Iterator[bytes]:
        message = begun_message(self._id, self._model, len(prompt_ids))
        yield event({"type": "message_start", "message": message})

    def more(self, part: str, text: str) -> Iterator[bytes]:
        if part != self._open:
            yield from self._close()
            yield self._begin(text_block(part, "", ""))
            self._open = part
        kind, name = ("thinking_delta", "thinking") if part == "reasoning" else ("text_delta", "text")
        yield self._delta({"type": kind, name: text})

    def end(self, finished: Json) -> Iterator[bytes]:
        message = as_message(finished)
        yield from self._close()
        for block in message["content"][self._num_blocks :]:
            if block["type"] == "tool_use":
                yield self._begin(block | {"input": {}})
                arguments = msgspec.json.encode(block["input"]).decode()
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            else:  # an answer without text
                yield self._begin(block)
            yield self._end()
        left = {name: message[name] for name in ("usage", *TOKEN_FIELDS)}
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield event({"type": "message_delta", "delta": delta, **left})
        yield event({"type": "message_stop"})

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield event(error_body(error))

    def _close(self) -> Iterator[bytes]:
        if self._open == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": self._id})
        if self._open:
            yield self._end()
        self._open = ""

    def _begin(self, block: Json) -> bytes:
        return event({"type": "content_block_start", "index": self._num_blocks, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _end(self) -> bytes:
        self._num_blocks += 1
        return event({"type": "content_block_stop", "index": self._num_blocks - 1})


def event(body: Json) -> bytes:
    """Encodes a server-sent event; its body's type, if it has one, names it."""
    name = f"event: {body['type']}\n".encode() if "type" in body else b""
    return name + b"data: " + msgspec.json.encode(body) + b"\n\n"
