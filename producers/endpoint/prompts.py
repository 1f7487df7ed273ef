"""From an agent's messages to the token ids that the engine is given."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from penstock.producers.endpoint.call_ledger import Call, CallLedger
from penstock.producers.endpoint.chat.errors import bad_request
from penstock.producers.endpoint.chat.messages import for_template
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.producers.endpoint.splice.suffix_encoding import Encoded, SuffixEncoder
from penstock.producers.endpoint.splice.token_ids import SpliceRefused
from penstock.producers.endpoint.splice.turn_boundary import find_turn_boundary, special_token_ids
from penstock.schemas.config import ConfigError

Json = dict[str, Any]


class RenderedPrompt(NamedTuple):
    """The prompt of one call.

    kind: `first` opens a conversation; `spliced` continues the tokens of `parent`, which are also the template's;
        `drifted` continues them although the template would have written others; `as_sent` is the rendering of the
        messages instead of a continuation.
    reason: why the call opens a new segment; empty if it does not.
    """

    token_ids: list[int]
    kind: Literal["first", "spliced", "drifted", "as_sent"]
    parent: Call | None
    reason: str
    rendered: Encoded

    @property
    def base(self) -> Call | None:
        """The call whose prompt and completion the ids begin with."""
        return None if self.reason else self.parent


class Prompts:
    """Renders prompts by the model's own chat template.

    tokenizer: a transformers tokenizer with a chat template. Not thread-safe.
    """

    def __init__(self, tokenizer: Any, *, stop_token_ids: Sequence[int]) -> None:
        """
        Raises:
            ConfigError: a chat template that refuses a conversation.
        """
        self._tokenizer = tokenizer
        self._encoder = SuffixEncoder(tokenizer)

        def render(messages: list[Json], add_generation_prompt: bool) -> list[int]:
            return self._encoder.encode(self._text(for_template(messages), None, {}, add_generation_prompt)).token_ids

        try:
            self._boundary = find_turn_boundary(render, [*special_token_ids(tokenizer), *stop_token_ids])
        except Exception as error:  # the chat template is the model's own and may raise anything
            raise ConfigError(
                f"model.path: its chat template refuses a user's and an assistant's turn: {error}; [endpoint] needs "
                "one that takes both"
            ) from error
        self.is_alternate_stop = self._boundary.is_alternate_stop

    def prompt(self, request: ChatRequest, ledger: CallLedger) -> RenderedPrompt:
        """Returns the ids for a request.

        Raises:
            ApiError: 400, the template refuses the messages; see `CallLedger.parent` as well.
        """
        found = ledger.parent(request.messages)
        messages = for_template(request.messages)
        if found is None:
            rendered = self._encode(request, messages, True, None)
            answered = any(message["role"] == "assistant" for message in messages)
            reason = ("unknown_history" if answered else "new_conversation") if ledger.calls else ""
            return RenderedPrompt(rendered.token_ids, "first", None, reason, rendered)
        parent, index = found
        known = parent.rendered
        prefix = self._encode(request, messages[: index + 1], False, known)
        rendered = self._encode(request, messages, True, prefix)
        try:
            ids = self._boundary.splice(parent.token_ids, prefix.token_ids, rendered.token_ids, parent.spans)
        except SpliceRefused as refused:
            return RenderedPrompt(rendered.token_ids, "as_sent", parent, refused.code, rendered)
        return RenderedPrompt(ids, "spliced" if ids == rendered.token_ids else "drifted", parent, "", rendered)

    def _encode(
        self, request: ChatRequest, messages: list[Json], add_generation_prompt: bool, known: Encoded | None
    ) -> Encoded:
        try:
            text = self._text(messages, request.tools or None, request.template_arguments, add_generation_prompt)
            encoded = self._encoder.encode(text, known)
        except Exception as error:  # the chat template is the model's own and may raise anything
            raise bad_request(
                f"the model's chat template refuses the messages: {type(error).__name__}: {error}", "messages"
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
