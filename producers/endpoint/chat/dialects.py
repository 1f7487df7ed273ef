"""The three APIs of the endpoint. Each is a translation onto chat completions, so a conversation is the same in all."""

from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.producers.endpoint.chat import anthropic, responses
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.producers.endpoint.chat.streams import ChatEvents, Events, MessageEvents, ResponseEvents

Json = dict[str, Any]


class Dialect(NamedTuple):
    """One API.

    path: of its requests, after `/v1/`.
    as_chat: makes a request one for a chat completion.
    answer: makes a finished chat completion the answer to a request.
    events: makes the events of an answer, of a completion's id, the model's name, the request, and its chat completion.
    error: makes an error the body of a response.
    """

    path: str
    as_chat: Callable[[Json], Json]
    answer: Callable[[Json, Json], Json]
    events: Callable[[str, str, Json, ChatRequest], Events]
    error: Callable[[ApiError], Json]


def _openai_error(error: ApiError) -> Json:
    return error.body


CHAT = Dialect(
    path="chat/completions",
    as_chat=lambda document: document,
    answer=lambda document, finished: finished,
    events=lambda name, model, document, asked: ChatEvents(name, model, asked),
    error=_openai_error,
)
RESPONSES = Dialect(
    path="responses",
    as_chat=responses.as_chat,
    answer=responses.as_response,
    events=lambda name, model, document, asked: ResponseEvents(name, model, document),
    error=_openai_error,
)
MESSAGES = Dialect(
    path="messages",
    as_chat=anthropic.as_chat,
    answer=lambda document, finished: anthropic.as_message(finished),
    events=lambda name, model, document, asked: MessageEvents(name, model),
    error=anthropic.error_body,
)
DIALECTS = (CHAT, RESPONSES, MESSAGES)
