"""From sampled token ids to an answer: its text, its reasoning and its tool calls, as an OpenAI client reads them."""

import json
import logging
import secrets
import string
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from penstock.producers.endpoint.chat.messages import CALL_ID_LENGTH
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS
from penstock.producers.endpoint.splice.turn_boundary import special_token_ids
from penstock.producers.interfaces import Completion
from penstock.schemas.rollout import unpack_floats, unpack_ids

log = logging.getLogger(__name__)

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
_ID_CHARACTERS = string.ascii_letters + string.digits


class ParsedAnswer(NamedTuple):
    """content: None if nothing is left apart from reasoning and calls. tool_calls: names and JSON arguments."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()


class AnswerParser(Protocol):
    """Finds reasoning and tool calls in an answer's text."""

    skip_special_tokens: bool
    """Whether the text is decoded without the tokenizer's special tokens; those that mark calls may be among them."""

    def parse(self, text: str, token_ids: list[int], request: ChatRequest, prompt_ids: list[int]) -> ParsedAnswer:
        """Parses `text`, decoded from `token_ids`, as the answer to `request`, which was sent as `prompt_ids`."""
        ...


class PlainText:
    """A parser that leaves everything in the text."""

    skip_special_tokens = True

    def parse(self, text: str, token_ids: list[int], request: ChatRequest, prompt_ids: list[int]) -> ParsedAnswer:
        return ParsedAnswer(text)


class Answers:
    """Decodes completions. Not thread-safe.

    tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any, parser: AnswerParser) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._special = special_token_ids(tokenizer)

    def ended(self, request: ChatRequest, completion: Completion) -> tuple[Completion, bool]:
        """Returns the completion up to and including the token that completes one of the request's stop strings, and
        whether there is one. The engine may not have ended it there: it searches each part of a resumed one alone."""
        token_ids = unpack_ids(completion.token_ids).tolist()

        def is_stopped(num: int) -> bool:
            return _first_stop(self._decode(token_ids[:num]), request.stop) is not None

        if not is_stopped(len(token_ids)):
            return completion, False
        num = bisect_left(range(len(token_ids)), True, key=is_stopped)
        return replace(completion.part(0, num), finish_reason="stop"), True

    def message(self, request: ChatRequest, prompt_ids: list[int], completion: Completion) -> Json:
        """Returns the assistant's message, with prompt ids, sampled ids and logprobs under NeMo Gym's field names."""
        token_ids = unpack_ids(completion.token_ids).tolist()
        parsed = self._parse(request, prompt_ids, token_ids, completion)
        message: Json = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning is not None:
            message["reasoning"] = parsed.reasoning
        calls = parsed.tool_calls if request.parallel_tool_calls else parsed.tool_calls[:1]
        if calls:
            message["tool_calls"] = [
                {
                    "id": "".join(secrets.choice(_ID_CHARACTERS) for _ in range(CALL_ID_LENGTH)),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for name, arguments in calls
            ]
        logprobs = unpack_floats(completion.behavior_logprobs).tolist()
        return message | dict(zip(TOKEN_FIELDS, (prompt_ids, token_ids, logprobs), strict=True))

    def logprobs(self, request: ChatRequest, message: Json) -> Json:
        """Returns the sampled tokens' logprobs in OpenAI's form."""
        content = []
        for token_id, logprob in zip(message["generation_token_ids"], message["generation_log_probs"], strict=True):
            token = self._tokenizer.decode([token_id])
            shown = f"token_id:{token_id}" if request.tokens_as_ids else token
            content.append({"token": shown, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _parse(
        self, request: ChatRequest, prompt_ids: list[int], token_ids: list[int], completion: Completion
    ) -> ParsedAnswer:
        # The stop token is not part of the text.
        stopped = completion.finish_reason == "stop" and token_ids and token_ids[-1] in self._special
        shown = token_ids[:-1] if stopped else token_ids
        text = self._decode(shown)
        text = text[: _first_stop(text, request.stop)]
        try:
            return self._parser.parse(text, shown, request, prompt_ids)
        except Exception:  # a policy may write anything, and a parser that fails must not lose what was sampled
            log.exception("an answer of %d tokens could not be parsed: left as text", len(shown))
            return ParsedAnswer(text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._parser.skip_special_tokens, clean_up_tokenization_spaces=False
        )


def _first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Returns where the first of the stop strings begins; None without one."""
    return min((at for one in stop if (at := text.find(one)) >= 0), default=None)


def finish_reason(completion: Completion, message: Json) -> str:
    """Returns OpenAI's name for how an answer ended."""
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if "tool_calls" in message else "stop"


def response(
    completion_id: str, model: str, request: ChatRequest, message: Json, logprobs: Json | None, reason: str
) -> Json:
    """Returns a chat completion of one choice, on demand with vLLM's own fields of token ids."""
    num_prompt, num_sampled = len(message["prompt_token_ids"]), len(message["generation_token_ids"])
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}
    if request.token_ids:
        choice["token_ids"] = message["generation_token_ids"]
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    } | ({"prompt_token_ids": message["prompt_token_ids"]} if request.token_ids else {})


def chunks(finished: Json, include_usage: bool) -> Iterator[bytes]:
    """Yields a finished response as the server-sent events of a stream."""
    choice = finished["choices"][0]
    message = choice["message"]
    deltas: list[tuple[Json, Json | None, str | None]] = [({"role": "assistant", "content": ""}, None, None)]
    if "reasoning" in message:
        deltas.append(({"reasoning": message["reasoning"]}, None, None))
    if message["content"]:
        deltas.append(({"content": message["content"]}, choice["logprobs"], None))
    if "tool_calls" in message:
        calls = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
        deltas.append(({"tool_calls": calls}, None if message["content"] else choice["logprobs"], None))
    deltas.append(({name: message[name] for name in TOKEN_FIELDS}, None, choice["finish_reason"]))
    head = {name: finished[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    first = {name: finished[name] for name in finished.keys() & {"prompt_token_ids"}}
    last = {name: choice[name] for name in choice.keys() & {"token_ids"}}
    for n, (delta, logprobs, reason) in enumerate(deltas):
        shown = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        yield event(head | (first if n == 0 else {}) | {"choices": [shown | (last if reason else {})]})
    if include_usage:
        yield event(head | {"choices": [], "usage": finished["usage"]})
    yield DONE


def event(body: Json) -> bytes:
    """Encodes a server-sent event; its body's type, if it has one, names it."""
    name = f"event: {body['type']}\n".encode() if "type" in body else b""
    return name + b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
