"""The form of the splice that a chat template allows, found by rendering a short conversation."""

from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import msgspec

from penstock.producers.endpoint.splice.token_ids import Spans, splice, splice_at_turn_start
from penstock.schemas.prefixes import num_shared

Render = Callable[[list[dict[str, Any]], bool], list[int]]
"""Messages, and whether a generation prompt follows them, to ids."""

_USER: dict[str, Any] = {"role": "user", "content": "a"}


class TurnBoundary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that separate a template's turns.

    turn_end_token_id: the token that it writes after an assistant turn; None without one.
    turn_start_token_ids: without such a token, the tokens that open turns.
    control_token_ids: tokens that structure a prompt and stay in the history.
    """

    turn_end_token_id: int | None = None
    turn_start_token_ids: frozenset[int] = frozenset()
    control_token_ids: frozenset[int] = frozenset()

    def splice(
        self,
        model_prefix_token_ids: list[int],
        template_prefix_token_ids: list[int],
        template_token_ids: list[int],
        generated_spans: Spans,
    ) -> list[int]:
        """Returns the next prompt, strictly checked; arguments as for `token_ids.splice`.

        Raises:
            SpliceRefused: send the template's prompt, in a new segment.
        """
        ids = model_prefix_token_ids, template_prefix_token_ids, template_token_ids
        if self.turn_end_token_id is None and self.turn_start_token_ids:
            return splice_at_turn_start(*ids, self.turn_start_token_ids, generated_spans=generated_spans)
        return splice(
            *ids,
            self.turn_end_token_id,
            generated_spans=generated_spans,
            control_token_ids=self.control_token_ids,
        )

    def is_alternate_stop(self, token_id: int) -> bool:
        """Returns whether an answer that ended with this token ended otherwise than the template writes it. A template
        without an end of turn has the next turn's opening there; False if it has no tokens to count turns by."""
        if self.turn_end_token_id is not None:
            return token_id != self.turn_end_token_id
        return bool(self.turn_start_token_ids) and token_id not in self.turn_start_token_ids


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Returns every token that the tokenizer marks as special, named or not."""
    marked = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *marked))


def find_turn_boundary(render: Render, control_token_ids: Collection[int]) -> TurnBoundary:
    """Finds what separates turns: renders user and assistant turns and looks at what follows the assistant's text.

    A template without tokens to count turns by gives a boundary that refuses every splice.

    Args:
        control_token_ids: the tokenizer's special tokens, and every token that the model may stop with.
    """
    specials = frozenset(control_token_ids)
    answer = {"role": "assistant", "content": "b"}
    prompt, history = render([_USER], True), render([_USER, answer, _USER], False)
    # The generation prompt may open a block (an empty one for reasoning) that history does not repeat.
    kept = specials - set(prompt[num_shared(prompt, history) :])
    answers = [render([_USER, {"role": "assistant", "content": content}], False) for content in ("b", "c")]
    ending = [token_id for token_id in _shared_end(*answers) if token_id in specials]
    if ending:
        return TurnBoundary(turn_end_token_id=ending[0], control_token_ids=kept)
    asked = render([_USER], False)
    openings = [_shared_end(asked, history), prompt[len(asked) :], _tool_turn(render)]
    openers = [[token_id for token_id in opening if token_id in specials][:1] for opening in openings]
    return TurnBoundary(turn_start_token_ids=frozenset(chain.from_iterable(openers)), control_token_ids=kept)


def _tool_turn(render: Render) -> list[int]:
    """Renders a turn with a tool's result; empty if the template refuses such turns."""
    result = {"role": "tool", "tool_call_id": "call00001", "content": "d"}
    # Templates differ in whether they take arguments parsed or as text.
    for arguments in ({"x": 1}, '{"x": 1}'):
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        calling: dict[str, Any] = {"role": "assistant", "content": "b", "tool_calls": [call]}
        asked = [_USER, calling]
        try:
            return render([*asked, result], False)[len(render(asked, False)) :]
        except Exception:  # the template's own refusal, of whatever type
            continue
    return []


def _shared_end(left: list[int], right: list[int]) -> list[int]:
    """Returns the longest common suffix."""
    return left[len(left) - num_shared(left[::-1], right[::-1]) :]
