"""From an agent's messages to the token ids that the engine is given."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from penstock.producers.endpoint.call_ledger import Call, CallLedger
from penstock.producers.endpoint.chat.errors import ApiError, bad_request, too_long
from penstock.producers.endpoint.chat.messages import for_template, images_of
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.producers.endpoint.splice.suffix_encoding import Encoded, SuffixEncoder
from penstock.producers.endpoint.splice.token_ids import SpliceRefused
from penstock.producers.endpoint.splice.turn_boundary import find_turn_boundary, special_token_ids
from penstock.producers.endpoint.splice.vocabulary import Vocabulary
from penstock.producers.interfaces import NO_IMAGES, PlacedImages
from penstock.producers.rollout.chat_template import LeftOut, read_variables
from penstock.schemas.config import RESERVED_BY_TEMPLATES, ConfigError

Json = dict[str, Any]
Expand = Callable[[list[int], Sequence[bytes]], tuple[list[int], PlacedImages]]


class RenderedPrompt(NamedTuple):
    """The prompt of one call.

    kind: `first` opens a conversation; `spliced` continues the tokens of `parent`, which are also the template's;
        `drifted` continues them although the template would have written others; `as_sent` is the rendering of the
        messages instead of a continuation.
    reason: why the call opens a new segment; empty if it does not.
    left_out: names of what the request has and the chat template does not render.
    images: of the prompt; `rendered` has one placeholder for each.
    """

    token_ids: list[int]
    kind: Literal["first", "spliced", "drifted", "as_sent"]
    parent: Call | None
    reason: str
    rendered: Encoded
    left_out: tuple[str, ...] = ()
    images: PlacedImages = NO_IMAGES

    @property
    def base(self) -> Call | None:
        """The call whose prompt and completion the ids begin with."""
        return None if self.reason else self.parent


class Prompts:
    """Renders prompts by the model's own chat template.

    tokenizer: a transformers tokenizer with a chat template, for this object alone.
    max_model_len: the longest prompt plus completion, in tokens; None without a limit. A text that is longer whatever
        its tokens are is not encoded.
    expand: puts the tokens of images in the places of their placeholders, as `Engine.expand`; None for a model of text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int],
        max_model_len: int | None = None,
        expand: Expand | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: a chat template that refuses a conversation.
        """
        self._tokenizer = tokenizer
        self._encoder = SuffixEncoder(tokenizer)
        self._vocabulary = Vocabulary(tokenizer)
        self._max_model_len = max_model_len
        self._expand = expand
        self._left_out = LeftOut()

        at = ""

        def render(messages: list[Json], add_generation_prompt: bool) -> list[int]:
            nonlocal at
            at = "chat template refuses"
            text = self._text(for_template(messages), None, {}, add_generation_prompt)
            at = "tokenizer cannot encode"
            return self._encoder.encode(text).token_ids

        try:
            self._boundary = find_turn_boundary(render, [*special_token_ids(tokenizer), *stop_token_ids])
        except Exception as error:  # both are the model's own and may raise anything
            raise ConfigError(
                f"model.path: its {at} a user's and an assistant's turn: {type(error).__name__}: {error}; [endpoint] "
                "needs one that takes both"
            ) from error
        self._read_variables = read_variables(tokenizer.chat_template)
        self.is_alternate_stop = self._boundary.is_alternate_stop

    def prompt(self, request: ChatRequest, ledger: CallLedger) -> RenderedPrompt:
        """Returns the ids for a request. Any number of threads may call it at once.

        Raises:
            ApiError: 400, the template refuses the messages or leaves out what the model should know, or the messages
                are too long; see `CallLedger.parent` as well.
        """
        unread = self._check_read(request)
        read = {name: value for name, value in request.template_arguments.items() if name in self._read_variables}
        tools = request.tools if "tools" in self._read_variables else []
        request = request._replace(template_arguments=read, tools=tools)
        found = ledger.parent(request.messages)
        messages = for_template(request.messages)
        prompt = (
            self._continued(request, messages, found) if found is not None else self._first(request, messages, ledger)
        )
        num_known = 0 if found is None or prompt.base is None else found[1] + 1
        left_out = self._check_left_out(request, messages, num_known, prompt.rendered.text)
        return prompt._replace(left_out=(*unread, *left_out))

    def _first(self, request: ChatRequest, messages: list[Json], ledger: CallLedger) -> RenderedPrompt:
        rendered = self._encode(request, messages, True, None)
        answered = any(message["role"] == "assistant" for message in messages)
        reason = ("unknown_history" if answered else "new_conversation") if ledger.calls else ""
        ids, images = self._expanded(request, request.messages, rendered)
        return RenderedPrompt(ids, "first", None, reason, rendered, images=images)

    def _continued(self, request: ChatRequest, messages: list[Json], found: tuple[Call, int]) -> RenderedPrompt:
        parent, index = found
        known = parent.rendered
        prefix = self._encode(request, messages[: index + 1], False, known)
        rendered = self._encode(request, messages, True, prefix)
        prefix_ids, before = self._expanded(request, request.messages[: index + 1], prefix)
        template_ids, images = self._expanded(request, request.messages, rendered)
        try:
            if [place.digest for place in before.places] != [place.digest for place in parent.images]:
                raise SpliceRefused("environment_block_mismatch", "other images")
            ids = self._boundary.splice(parent.token_ids, prefix_ids, template_ids, parent.spans)
        except SpliceRefused as refused:
            return RenderedPrompt(template_ids, "as_sent", parent, refused.code, rendered, images=images)
        new = (place.moved(len(ids) - len(template_ids)) for place in images.places[len(before.places) :])
        images = images._replace(places=(*parent.images, *new))
        kind: Literal["spliced", "drifted"] = "spliced" if ids == template_ids else "drifted"
        return RenderedPrompt(ids, kind, parent, "", rendered, images=images)

    def _expanded(
        self, request: ChatRequest, messages: list[Json], rendered: Encoded
    ) -> tuple[list[int], PlacedImages]:
        if self._expand is None:
            return rendered.token_ids, NO_IMAGES
        try:
            return self._expand(rendered.token_ids, [request.images[each] for each in images_of(messages)])
        except ValueError as error:
            raise bad_request(f"messages: {error}", "messages", "invalid_image") from error

    def _check_read(self, request: ChatRequest) -> list[str]:
        """Returns names of what the request has and the chat template never reads, whatever it holds.

        Raises:
            ApiError: 400, there is something, and the request may not be answered without it.
        """
        unread = [name for name in request.template_arguments if name not in self._read_variables]
        if unread and not request.ignores:
            own = ", ".join(sorted(self._read_variables - RESERVED_BY_TEMPLATES))
            raise bad_request(
                f"chat_template_kwargs.{unread[0][:64]}: the model's chat template does not read it, so it would "
                f"have no effect; expected variables that it reads: {own or 'it has none of its own'}",
                "chat_template_kwargs",
                "unsupported_parameter",
            )
        names = [f"chat_template_kwargs.{name}" for name in unread]
        if request.tools and "tools" not in self._read_variables:
            if not request.ignores:
                raise _left_out(f"tools has {request.tools[0]['function']['name']!r}", "tools")
            names.append("tools")
        return names

    def _check_left_out(self, request: ChatRequest, messages: list[Json], num_known: int, text: str) -> tuple[str, ...]:
        """Returns names of what the request has and its rendering `text` does not show. num_known: messages at the
        beginning that the prompt has from an earlier call.

        Raises:
            ApiError: 400, there is something, and the request may not be answered without it.
        """
        tools, variables = request.tools or None, request.template_arguments
        context = json.dumps(variables, sort_keys=True, default=repr) if variables else ""

        def render(messages: list[Json], tools: list[Json] | None) -> str:
            return self._text(messages, tools, variables, True)

        said = self._left_out.messages(render, messages, tools, text, range(num_known, len(messages)), context)
        told = self._left_out.tools(render, messages, tools, text, context) if tools is not None else []
        if request.ignores:
            names = dict.fromkeys(re.sub(r"\[\d+\]", "", field) for field in said)
            return (*names, *(["tools"] if told else []))
        for fields, param in ((told, "tools"), (said, "messages")):
            if fields:
                raise _left_out(fields[0], param)
        return ()

    def _encode(
        self, request: ChatRequest, messages: list[Json], add_generation_prompt: bool, known: Encoded | None
    ) -> Encoded:
        try:
            text = self._text(messages, request.tools or None, request.template_arguments, add_generation_prompt)
        except Exception as error:  # the chat template is the model's own and may raise anything
            raise bad_request(
                f"the model's chat template refuses the messages: {type(error).__name__}: {error}", "messages"
            ) from error
        if self._max_model_len is not None and (least := self._vocabulary.least_tokens(text)) >= self._max_model_len:
            raise too_long(self._max_model_len, f"at least {least}")
        try:
            encoded = self._encoder.encode(text, known)
        except Exception as error:  # the tokenizer is the model's own and may raise anything
            raise bad_request(
                f"the model's tokenizer cannot encode the messages: {type(error).__name__}: {error}", "messages"
            ) from error
        if not encoded.token_ids:
            raise bad_request("the messages render to no tokens, expected at least one", "messages")
        return encoded

    def _text(
        self, messages: list[Json], tools: list[Json] | None, arguments: Json, add_generation_prompt: bool
    ) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **arguments
        )


def _left_out(field: str, param: str) -> ApiError:
    return bad_request(
        f"{field}: the model's chat template does not render it, or not all of it, so the model would not know of it; "
        f"expected no such {param}, or a model whose chat template renders them",
        param,
        "unsupported_parameter",
    )
