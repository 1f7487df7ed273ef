"""The next prompt of a conversation, which keeps every token that the model saw and sampled.

A chat template builds each prompt from text, and text may encode to other ids than the model sampled. The splice takes
the part before the boundary from the model's own ids and the rest from the template:

- M, the model's prefix: prompt ids and sampled ids of the newest call that the conversation holds
- P, the template's prefix: the messages up to that call's answer, rendered without a generation prompt
- T, the template: all messages, rendered with one

The boundary is the end of the last turn of P. It is found by counting turns, not by position: a template may drop the
reasoning of earlier turns once a user turn follows. A doubtful splice is refused; the caller then sends T as it is, and
the rollout continues in a new segment.
"""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.schemas.prefixes import num_shared
from penstock.schemas.rollout import pack_ids

Spans = Sequence[tuple[int, int]]
"""Half-open, ascending, disjoint."""

TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""The fields by which a message carries the call that sampled it: all three or none."""


class SpliceRefused(ValueError):
    """The template's prompt cannot continue the model's prefix. `code` says why, and is a metric's label:

    - `invalid_token_ids`: something other than integers from 0 to 2^31 - 1
    - `no_eos_configured`, `no_turn_start_configured`: no tokens to find the boundary by
    - `template_prefix_has_no_eos`, `template_prefix_has_no_turn_start`: P holds no turn
    - `template_eos_underflow`, `template_turn_start_underflow`: T ends before P does
    - `turn_count_mismatch`: turns were dropped or added, or P was cut at another message than M
    - `environment_block_mismatch`: text that the model was given was edited
    - `tail_mismatch`: the template writes the end of the last turn otherwise once a turn follows
    """

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code


class TokenMetadataError(ValueError):
    """A message's token fields contradict each other, or the model did not write it. `code` is
    `partial_token_metadata`, `logprob_length_mismatch`, `invalid_token_ids` or `token_metadata_on_non_assistant`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


def extract_model_prefix(messages: Sequence[Mapping[str, Any]]) -> tuple[int | None, list[int]]:
    """Finds the newest message that carries token ids, and M: the ids it was prompted with and those it sampled.

    Returns:
        The message's index and M; `(None, [])` when no message carries any. A field that is null counts as absent.

    Raises:
        TokenMetadataError: only some of `TOKEN_FIELDS`, invalid ids, or not one logprob for each sampled id; any of the
            fields on a message of another role than `assistant`, wherever it stands.
    """
    for index, message in enumerate(messages):
        if message.get("role") != "assistant" and any(message.get(name) is not None for name in TOKEN_FIELDS):
            raise TokenMetadataError(
                "token_metadata_on_non_assistant",
                f"messages[{index}] has the role {message.get('role')!r} and token ids; expected them on messages of "
                "the model (role 'assistant') alone",
            )
    for index in reversed(range(len(messages))):
        values: list[Any] = [messages[index].get(name) for name in TOKEN_FIELDS]
        missing = [name for name, value in zip(TOKEN_FIELDS, values, strict=True) if value is None]
        if len(missing) == len(TOKEN_FIELDS):
            continue
        if missing:
            raise TokenMetadataError(
                "partial_token_metadata", f"messages[{index}] lacks {', '.join(missing)}; expected all three or none"
            )
        prompt, generated, logprobs = values
        for name, value in zip(TOKEN_FIELDS, values, strict=True):
            where = f"messages[{index}].{name}"
            if not isinstance(value, list | tuple):
                raise TokenMetadataError("invalid_token_ids", f"{where} is {type(value).__name__}, expected a list")
            if value is not logprobs and not _are_ids(value):
                raise TokenMetadataError("invalid_token_ids", f"{where} holds something other than integers from 0 on")
        if len(generated) != len(logprobs):
            raise TokenMetadataError(
                "logprob_length_mismatch",
                f"messages[{index}] holds {len(generated)} generation_token_ids and {len(logprobs)} "
                "generation_log_probs; expected equal lengths",
            )
        return index, [*prompt, *generated]
    return None, []


def bridge(model_prefix_token_ids: Sequence[int], bridge_token_ids: Sequence[int]) -> list[int]:
    """Returns M followed by the template from the end of its last turn on; a token in which they overlap is kept once.

    The overlap is the token that ends a turn, sampled by the model and written by the template too. One that the model
    did not sample comes from the template: context, with loss mask 0. Another stop token than the template's stays.
    """
    overlap = model_prefix_token_ids[-1:] == bridge_token_ids[:1]
    return [*model_prefix_token_ids, *bridge_token_ids[1 if overlap else 0 :]]


def splice(
    model_prefix_token_ids: list[int],
    template_prefix_token_ids: list[int],
    template_token_ids: list[int],
    eos_token_id: int | None,
    *,
    strict: bool = True,
    generated_spans: Spans | None = None,
    control_token_ids: Collection[int] = (),
) -> list[int]:
    """Returns the next prompt: M without one trailing EOS, then T from its nth EOS on, where n counts those of P.

    For templates that write an EOS after assistant turns. An empty M gives T.

    Args:
        eos_token_id: what the template writes after an assistant turn.
        strict: False checks only that the boundary exists. A turn that was dropped then comes back with M.
        generated_spans: the tokens of M that were sampled. With them, the rest of M is compared with P; None: it is
            unknown, and edited text goes unnoticed.
        control_token_ids: in a block that holds sampled tokens, what precedes them is compared with P up to the last
            of these (the generation prompt after it need not stay in the history). Without them such blocks are not
            compared, and neither is a user turn that no EOS separates from its answer.

    Raises:
        SpliceRefused: as its codes say; with `strict`, what is compared differs.
        ValueError: `generated_spans` that are not spans of M.
    """
    model, prefix, template = model_prefix_token_ids, template_prefix_token_ids, template_token_ids
    _check_ids(model, prefix, template)
    if not model:
        return list(template)
    if eos_token_id is None:
        raise SpliceRefused("no_eos_configured")
    prefix_ends = list(_positions_of(eos_token_id, prefix))
    template_ends = list(_positions_of(eos_token_id, template))
    num_turns = len(prefix_ends)
    if not num_turns:
        raise SpliceRefused("template_prefix_has_no_eos")
    if len(template_ends) < num_turns:
        raise SpliceRefused("template_eos_underflow", f"{len(template_ends)} turns, {num_turns} in its prefix")
    boundary = template_ends[num_turns - 1]
    if strict:
        ended = model if model[-1] == eos_token_id else [*model, eos_token_id]
        model_ends = list(_positions_of(eos_token_id, ended))
        _check_turn_count(len(model_ends), num_turns)
        if generated_spans is not None:
            _check_context(
                (ended, [0, *(end + 1 for end in model_ends)]),
                (prefix, [0, *(end + 1 for end in prefix_ends)]),
                _checked(generated_spans, len(model)),
                frozenset(control_token_ids),
            )
        tail = prefix[prefix_ends[-1] + 1 :]
        if template[boundary + 1 : boundary + 1 + len(tail)] != tail:
            raise SpliceRefused("tail_mismatch", f"{len(tail)} ids after the last EOS of the template's prefix")
    return bridge(model, template[boundary:])


def splice_at_turn_start(
    model_prefix_token_ids: list[int],
    template_prefix_token_ids: list[int],
    template_token_ids: list[int],
    turn_start_token_ids: Collection[int],
    *,
    generated_spans: Spans,
) -> list[int]:
    """Returns the next prompt: M, then T from its turn n + 1 on, where n is the number of turns that P opens.

    For templates that write nothing after an assistant turn. There the model stops by sampling the token that opens
    the next turn; where the template opens it with another one, the sampled one stays and the template's follows.

    Args:
        turn_start_token_ids: every token that opens a turn, whatever its role.
        generated_spans: the tokens of M that were sampled.

    Raises:
        SpliceRefused: as its codes say; always strict.
        ValueError: `generated_spans` that are not spans of M.
    """
    model, prefix, template = model_prefix_token_ids, template_prefix_token_ids, template_token_ids
    _check_ids(model, prefix, template)
    if not model:
        return list(template)
    if not turn_start_token_ids:
        raise SpliceRefused("no_turn_start_configured")
    spans = _checked(generated_spans, len(model))
    openers = frozenset(turn_start_token_ids)
    prefix_starts = _positions(openers, prefix)
    template_starts = _positions(openers, template)
    num_turns = len(prefix_starts)
    if not num_turns:
        raise SpliceRefused("template_prefix_has_no_turn_start")
    if len(template_starts) <= num_turns:
        raise SpliceRefused(
            "template_turn_start_underflow",
            f"{len(template_starts)} turns, expected more than the {num_turns} of its prefix",
        )
    model_starts = _model_starts(model, openers, spans)
    _check_turn_count(len(model_starts), num_turns)
    # The opener of a turn may have been sampled as the end of the turn before, and as all of it.
    inside = [(start, end - 1 if model[end - 1] in openers else end) for start, end in spans]
    _check_context(
        (model, [0, *model_starts, len(model)]),
        (prefix, [0, *prefix_starts, len(prefix)]),
        inside,
        openers,
    )
    boundary = template_starts[num_turns]
    _check_last_turn(prefix[prefix_starts[-1] :], template[template_starts[num_turns - 1] : boundary])
    return bridge(model, template[boundary:])


def _model_starts(model: list[int], openers: frozenset[int], spans: Spans) -> list[int]:
    """Returns where the turns of M begin. A sampled opener at the end of M, or before one that the template wrote, ends
    a turn and begins none."""
    ends = {end - 1 for _, end in spans}
    return [
        position
        for position in _positions(openers, model)
        if not (position in ends and (position + 1 == len(model) or model[position + 1] in openers))
    ]


def _check_turn_count(num_model: int, num_prefix: int) -> None:
    if num_model != num_prefix:
        raise SpliceRefused(
            "turn_count_mismatch", f"{num_model} turns in the model's prefix, {num_prefix} in the template's"
        )


def _check_context(
    model: tuple[list[int], list[int]],
    prefix: tuple[list[int], list[int]],
    spans: Spans,
    control_token_ids: frozenset[int],
) -> None:
    """Compares what was not sampled, block by block. `model` and `prefix` are ids and the bounds of their blocks; the
    span of an empty answer is at the end of its block."""
    (ids, bounds), (others, other_bounds) = model, prefix
    position = 0
    for n, ((start, end), (other, other_end)) in enumerate(zip(pairwise(bounds), pairwise(other_bounds), strict=False)):
        while position < len(spans) and spans[position][1] <= start:
            position += 1
        if position < len(spans) and (spans[position][0] < end or spans[position][1] == end):
            lead = max(spans[position][0], start)
            end = next((k for k in range(lead, start, -1) if ids[k - 1] in control_token_ids), start)
            other_end = min(other_end, other + end - start)
        if ids[start:end] != others[other:other_end]:
            raise SpliceRefused("environment_block_mismatch", f"block {n} differs outside of what was sampled")


def _check_last_turn(prefix: list[int], template: list[int]) -> None:
    """Checks that the last turn of P is the same in T, or lacks a stretch (its reasoning) there. With more in it the
    boundary would be wrong."""
    head = num_shared(prefix, template)
    tail = num_shared(prefix[head:][::-1], template[head:][::-1])
    if head + tail != len(template):
        raise SpliceRefused("tail_mismatch", "the last turn of the template's prefix is another one in the template")


def _positions(wanted: frozenset[int], ids: list[int]) -> list[int]:
    return [position for position, token_id in enumerate(ids) if token_id in wanted]


def _positions_of(token_id: int, ids: list[int]) -> Iterator[int]:
    # `index` compares at C speed: less than half the time of `_positions`.
    position = -1
    for _ in range(ids.count(token_id)):
        position = ids.index(token_id, position + 1)
        yield position


def _checked(spans: Spans, num_tokens: int) -> list[tuple[int, int]]:
    """Returns the spans that hold a token, and raises ValueError if they are none of so many tokens."""
    previous = 0
    for start, end in spans:
        if not previous <= start <= end <= num_tokens:
            raise ValueError(
                f"generated_spans: ({start}, {end}), expected {previous} <= start <= end <= {num_tokens}, ascending"
            )
        previous = end
    return [(start, end) for start, end in spans if end > start]


def _check_ids(*sequences: Sequence[int]) -> None:
    for ids in sequences:
        if not _are_ids(ids):
            raise SpliceRefused("invalid_token_ids", "expected integers from 0 to 2^31 - 1")


def _are_ids(ids: Sequence[Any]) -> bool:
    try:
        # The highest byte of a negative number is not ASCII.
        return pack_ids(ids)[3::4].isascii()
    except struct.error:
        return False
