"""From sampled token ids to an answer: its text, its reasoning and its tool calls, as an OpenAI client reads them."""

import logging
import re
import secrets
import string
import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from penstock.producers.endpoint.chat.messages import CALL_ID_LENGTH
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.producers.endpoint.splice.token_ids import TOKEN_FIELDS
from penstock.producers.endpoint.splice.turn_boundary import special_token_ids
from penstock.producers.endpoint.splice.vocabulary import Vocabulary
from penstock.producers.interfaces import Completion
from penstock.schemas.rollout import unpack_floats, unpack_ids

log = logging.getLogger(__name__)

Json = dict[str, Any]

_ID_CHARACTERS = string.ascii_letters + string.digits
_MARKUP = re.compile(r"[<\[{`|\u25c1]")
"""How calls of tools and marks of reasoning begin."""
_MARK_CHARACTERS = 32
"""The most characters of a mark of reasoning."""
_LAST_WORD = re.compile(r"\s*\S*\Z")


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
    finds_reasoning: whether the parser separates reasoning from the text.
    """

    def __init__(self, tokenizer: Any, parser: AnswerParser, *, finds_reasoning: bool = False) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._finds_reasoning = finds_reasoning
        self._special = special_token_ids(tokenizer)
        self._vocabulary = Vocabulary(tokenizer)

    def ended(self, request: ChatRequest, completion: Completion) -> tuple[Completion, str | None]:
        """Returns the completion up to and including the token that completes one of the request's stop strings, and
        that string. The engine may not have ended it there: it searches each part of a resumed one alone."""
        token_ids = unpack_ids(completion.token_ids).tolist()

        def is_stopped(num: int) -> bool:
            return _first_stop(self._decode(token_ids[:num]), request.stop) is not None

        if not is_stopped(len(token_ids)):
            return completion, None
        num = bisect_left(range(len(token_ids)), True, key=is_stopped)
        text = self._decode(token_ids[:num])
        at = _first_stop(text, request.stop)
        stop = next(one for one in request.stop if text.startswith(one, at))
        return replace(completion.part(0, num), finish_reason="stop"), stop

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
                    "function": {"name": _encodable(name), "arguments": _encodable(arguments)},
                }
                for name, arguments in calls
            ]
        logprobs = unpack_floats(completion.behavior_logprobs).tolist()
        return message | dict(zip(TOKEN_FIELDS, (prompt_ids, token_ids, logprobs), strict=True))

    def so_far(self, request: ChatRequest, prompt_ids: list[int], completion: Completion) -> dict[str, str]:
        """Returns the text of an answer's `reasoning` and `content` that nothing sampled later will change.

        Parsers see only whole answers: what may yet become a call of a tool, or a mark of reasoning, is held back.
        """
        token_ids = unpack_ids(completion.token_ids).tolist()
        while token_ids and (token_ids[-1] in self._special or self._vocabulary.ends_inside(token_ids[-1])):
            token_ids.pop()
        text = self._decode(token_ids)
        text = text[: _first_stop(text, request.stop)]
        text = text[: len(text) - _num_begun(text, request.stop)]
        if isinstance(self._parser, PlainText):
            return {"content": text}
        try:
            parsed = self._parser.parse(text, token_ids, request, prompt_ids)
        except Exception:  # `message` says so
            return {}
        reasoning, content = parsed.reasoning or "", parsed.content or ""
        if not content and not parsed.tool_calls:
            reasoning = _before_marks(reasoning)
        if self._finds_reasoning and parsed.reasoning is None:
            return {}
        if request.use_tools:
            markup = _MARKUP.search(content)
            content = _LAST_WORD.sub("", content[: markup.start()] if markup else content)
        else:
            content = _before_marks(content)
        return {"reasoning": reasoning, "content": content if content.strip() else ""}

    def keep_sent(self, message: Json, sent: Mapping[str, str]) -> None:
        """Makes the text of a message begin with what its client has received of it."""
        for part, text in sent.items():
            if not (message.get(part) or "").startswith(text):
                log.warning("a streamed answer's %s differs from the parsed one, and stays as streamed", part)
                message[part] = text

    def logprobs(self, request: ChatRequest, message: Json) -> Json:
        """Returns the sampled tokens' logprobs in OpenAI's form."""
        content = []
        for token_id, logprob in zip(message["generation_token_ids"], message["generation_log_probs"], strict=True):
            token = self._tokenizer.decode([token_id])
            shown = f"token_id:{token_id}" if request.tokens_as_ids else token
            content.append(
                {
                    "token": shown,
                    "logprob": logprob,
                    "bytes": list(self._vocabulary.bytes_of(token_id)),
                    "top_logprobs": [],
                }
            )
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


def _encodable(text: str) -> str:
    """Returns a text with half of a surrogate pair, which no reply can hold, as JSON's escape of it: the same JSON."""
    return text.encode("utf-8", "backslashreplace").decode()


def _before_marks(text: str) -> str:
    """Returns the text before what may be the beginning of a mark at its end."""
    markup = _MARKUP.search(text, max(0, len(text) - _MARK_CHARACTERS))
    return _LAST_WORD.sub("", text[: markup.start()] if markup else text)


def _num_begun(text: str, stop: tuple[str, ...]) -> int:
    """Returns how many characters at the end of a text may be the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(one.startswith(text[-n:]) for one in stop)), 0)


def _first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Returns where the first of the stop strings begins; None without one."""
    return min((at for one in stop if (at := text.find(one)) >= 0), default=None)


def finish_reason(completion: Completion, message: Json) -> str:
    """Returns OpenAI's name for how an answer ended."""
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if "tool_calls" in message else "stop"


def response(
    completion_id: str,
    model: str,
    request: ChatRequest,
    message: Json,
    logprobs: Json | None,
    reason: str,
    stop: str | None,
) -> Json:
    """Returns a chat completion of one choice; `stop_reason`, the stop string that ended it, is vLLM's own field, as on
    demand those of token ids are."""
    num_prompt, num_sampled = len(message["prompt_token_ids"]), len(message["generation_token_ids"])
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}
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
