"""The splice: the golden cases, what it refuses, and what holds for every conversation that it accepts."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_token_ids import GOLDEN, mistral_tokenizer_file
from penstock.producers.endpoint.splice.token_ids import (
    TOKEN_FIELDS,
    SpliceRefused,
    TokenMetadataError,
    bridge,
    extract_model_prefix,
    splice,
    splice_at_turn_start,
)

EOS = 2


def spliced(case: dict, strict: bool) -> list[int]:
    given_ids = case["input"]
    return splice(
        given_ids["model_prefix_token_ids"],
        given_ids["template_prefix_token_ids"],
        given_ids["template_token_ids"],
        given_ids["eos_token_id"],
        strict=strict,
        generated_spans=given_ids.get("generated_spans"),
    )


def test_golden_splices_and_without_the_checks_the_references():
    for case in GOLDEN["splice_cases"]:
        name, error = case["id"], case.get("expected_error")
        if error is not None:
            assert code_of(spliced, case, case["strict"]) == error, name
        else:
            model, eos = case["input"]["model_prefix_token_ids"], case["input"]["eos_token_id"]
            result = spliced(case, case["strict"])
            assert result == case["expected"] and result[: len(model)] == model, name
            inserted = len(model) if model and model[-1] != eos else None
            assert inserted == case["inserted_terminator_index"], name
            assert inserted is None or result[inserted] == eos, name
        if error != "invalid_token_ids" and "result" in case["nemo_rl_reference"]:
            assert spliced(case, False) == case["nemo_rl_reference"]["result"], name


def test_golden_extractions_and_bridges():
    for case in GOLDEN["extract_cases"]:
        messages, expected = case["input"]["messages"], case.get("expected")
        if expected is None:
            with pytest.raises(TokenMetadataError) as refused:
                extract_model_prefix(messages)
            assert refused.value.code == case["expected_error"], case["id"]
        else:
            found = expected["message_index"], expected["model_prefix_token_ids"]
            assert extract_model_prefix(messages) == found, case["id"]
    for case in GOLDEN["bridge_cases"]:
        assert bridge(**case["input"]) == case["expected"], case["id"]


def test_golden_roundtrips_are_what_the_real_tokenizers_do():
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    for case in GOLDEN["roundtrip_cases"]:
        file = mistral_tokenizer_file(case["tokenizer"])
        tokenizer = Tekkenizer.from_file(file) if file.suffix == ".json" else SentencePieceTokenizer(file)
        assert [tokenizer.id_to_piece(token_id) for token_id in case["ids"]] == case["pieces"]
        assert tokenizer.decode(case["ids"]) == case["text"]
        assert tokenizer.encode(case["text"], bos=False, eos=False) == case["reencoded"] != case["ids"]


# What is refused beyond the golden cases


def code_of(call, *arguments, **keywords) -> str:
    with pytest.raises(SpliceRefused) as refused:
        call(*arguments, **keywords)
    assert str(refused.value).startswith(refused.value.code)
    return refused.value.code


def test_without_an_eos_nothing_can_be_spliced_but_a_first_call_can_be_made():
    assert code_of(splice, [5, 6], [5, 7], [5, 7, 8], None) == "no_eos_configured"
    assert splice([], [5, 7], [5, 7, 8], None) == [5, 7, 8]


def test_ids_and_spans_that_are_none_are_refused():
    for ids in ([1.5], ["1"], [None], [2**31], [-(2**31)]):
        for place in range(3):
            arguments = [[5, EOS], [5, EOS], [5, EOS, 7]]
            arguments[place] = ids
            assert code_of(splice, *arguments, EOS) == "invalid_token_ids"
            assert code_of(splice_at_turn_start, *arguments, [5], generated_spans=[]) == "invalid_token_ids"
    for spans in ([(0, 4)], [(2, 1)], [(1, 2), (0, 1)], [(-1, 1)]):
        with pytest.raises(ValueError, match="generated_spans"):
            splice([5, 6, EOS], [5, 6, EOS], [5, 6, EOS, 7], EOS, generated_spans=spans)


def test_spelling_the_end_of_a_turn_is_not_ending_it():
    """The model spelled the EOS in other tokens; the template reads an EOS there, and its turns are one more."""
    model, prefix = [1, EOS, 10, 81, 82, 60, EOS], [1, EOS, 10, EOS, 60, EOS]
    assert code_of(splice, model, prefix, [*prefix, 3], EOS, generated_spans=[(3, 7)]) == "turn_count_mismatch"


# The form for templates that write nothing after an assistant turn: SYSTEM, USER, ASSISTANT and TOOL open turns

USER, ASSISTANT, TOOL = 30, 20, 31
OPENERS = (USER, ASSISTANT, TOOL)


def test_a_splice_at_the_start_of_a_turn():
    """The answer was cut by its length, or ended by the next turn's opening, or by another's."""
    asked, other = [USER, 5, ASSISTANT], [USER, 5, ASSISTANT, 8]
    later = [TOOL, 7, ASSISTANT, 9]
    for model, prefix, added, rest, spans in [
        ([*asked, 6], [*asked, 6], [USER, 7], [USER, 7], [(3, 4)]),
        ([*asked, 6, TOOL], other, [TOOL, 7, ASSISTANT], [7, ASSISTANT], [(3, 5)]),
        ([*asked, 6, USER], other, [TOOL, 7], [TOOL, 7], [(3, 5)]),
        ([*asked, 6, *later, USER], [*other, *later], [USER, 4], [4], [(3, 5), (7, 9)]),
        ([*asked, 6, USER, *later], [*other, *later], [USER, 4], [USER, 4], [(3, 5), (8, 9)]),
        ([*asked, *later, USER], [*asked, 40, 41, *later], [USER, 4], [4], [(3, 4), (6, 8)]),
    ]:
        spliced = splice_at_turn_start(model, prefix, prefix + added, OPENERS, generated_spans=spans)
        assert spliced == model + rest, (model, added)


@pytest.mark.parametrize(("stop", "result"), [(TOOL, [TOOL]), (USER, [USER, TOOL])])
def test_an_answer_that_is_nothing_but_its_end_is_an_answer(stop, result):
    """The template's tokens in its place (40, 41) were not sampled, and the prompt does without them."""
    model, prefix = [USER, 5, ASSISTANT, stop], [USER, 5, ASSISTANT, 40, 41]
    spliced = splice_at_turn_start(model, prefix, [*prefix, TOOL, 7, ASSISTANT], OPENERS, generated_spans=[(3, 4)])
    assert spliced == [USER, 5, ASSISTANT, *result, 7, ASSISTANT]
    edited = [USER, 6, *prefix[2:]]
    code = code_of(splice_at_turn_start, model, edited, [*edited, TOOL], OPENERS, generated_spans=[(3, 4)])
    assert code == "environment_block_mismatch"


def test_what_is_refused_at_the_start_of_a_turn():
    model = [USER, 5, ASSISTANT, 6]
    for prefix, template, code in [
        ([5, 6], [5, 6, USER], "template_prefix_has_no_turn_start"),
        (model, model, "template_turn_start_underflow"),
        ([ASSISTANT, 6], [ASSISTANT, 6, USER], "turn_count_mismatch"),
        ([USER, 4, ASSISTANT, 6], [USER, 4, ASSISTANT, 6, USER], "environment_block_mismatch"),
        (model, [*model, 9, USER], "tail_mismatch"),
    ]:
        assert code_of(splice_at_turn_start, model, prefix, template, OPENERS, generated_spans=[(3, 4)]) == code


def test_a_turn_start_must_be_known_unless_there_is_nothing_to_splice():
    assert code_of(splice_at_turn_start, [5], [5], [5, 6], [], generated_spans=[]) == "no_turn_start_configured"
    assert splice_at_turn_start([], [5], [5, 6], [], generated_spans=[]) == [5, 6]


# Messages


def test_a_message_that_the_model_did_not_write_has_no_token_ids():
    answer = {"role": "assistant", **{name: [1] for name in TOKEN_FIELDS}}
    cases = itertools.product(("user", "tool", None), ({"prompt_token_ids": [1]}, {name: [1] for name in TOKEN_FIELDS}))
    for (role, fields), is_newest in itertools.product(cases, (True, False)):
        other = {"role": role, "content": "u", **fields}
        messages = [answer, other] if is_newest else [other, answer]
        with pytest.raises(TokenMetadataError, match=rf"messages\[{int(is_newest)}\] has the role {role!r}") as refused:
            extract_model_prefix(messages)
        assert refused.value.code == "token_metadata_on_non_assistant"
        assert extract_model_prefix([answer, {**other, **dict.fromkeys(fields)}]) == (0, [1, 1])


# What holds for every conversation


class SplicedConversation(NamedTuple):
    """M and its sampled spans, P and T; `added` is what T writes after the last turn of P and its end."""

    model: list[int]
    spans: list[tuple[int, int]]
    prefix: list[int]
    template: list[int]
    added: list[int]


words = st.lists(st.integers(100, 105), max_size=4)
HEADER, NEWLINE = 10, 11


@st.composite
def conversations(draw, *, canonical: bool = False) -> SplicedConversation:
    """Turns as ChatML writes them. An answer is sampled in other ids than the template writes, cut by length, or
    stopped by another token; the template drops the reasoning of earlier answers once more follows."""
    model: list[int] = []
    spans: list[tuple[int, int]] = []
    prefix: list[int] = []
    template: list[int] = []

    def context(ids: list[int]) -> None:
        for rendering in (model, prefix, template):
            rendering.extend(ids)

    num_answers = draw(st.integers(1, 3))
    for n in range(num_answers):
        for _ in range(draw(st.integers(1, 2))):
            context([HEADER, *draw(words), EOS, NEWLINE])
        context([HEADER])
        reasoning, text = draw(words), draw(words)
        sampled = [*reasoning, *text] if canonical else draw(words)
        stop = [EOS] if canonical else draw(st.sampled_from([[EOS], [], [99]]))
        if not sampled and not stop:
            reasoning = text = []
        kept = reasoning if canonical or n == num_answers - 1 else []
        start = len(model)
        model.extend([*sampled, *stop])
        spans.append((start, len(model)))
        prefix.extend([*kept, *text, EOS, NEWLINE])
        template.extend([*(kept if canonical else []), *text, EOS, NEWLINE])
        if n < num_answers - 1:
            model.extend([NEWLINE] if stop == [EOS] else [EOS, NEWLINE])
    added = [HEADER, *draw(words), EOS, NEWLINE, HEADER]
    return SplicedConversation(model, spans, prefix, [*template, *added], added)


def splice_of(conversation: SplicedConversation, **changes) -> list[int]:
    now = conversation._replace(**changes)
    return splice(
        now.model, now.prefix, now.template, EOS, generated_spans=now.spans, control_token_ids=[HEADER, EOS, 99]
    )


@settings(deadline=None, derandomize=True)
@given(conversations())
def test_the_prompt_starts_with_what_the_model_has_seen_and_goes_on_as_the_template_does(conversation):
    result = splice_of(conversation)
    assert result[: len(conversation.model)] == conversation.model
    end = [] if conversation.model[-1] == EOS else [EOS]
    assert result[len(conversation.model) :] == [*end, NEWLINE, *conversation.added]


@settings(deadline=None, derandomize=True)
@given(conversations(canonical=True))
def test_a_canonical_prefix_gives_the_templates_own_prompt(conversation):
    assert splice_of(conversation) == conversation.template


@settings(deadline=None, derandomize=True)
@given(conversations(), st.data())
def test_an_edit_of_what_the_model_was_given_is_refused(conversation, data):
    """One token of a question is another one in the template's renderings."""
    context = [
        position
        for position, token_id in enumerate(conversation.model)
        if token_id >= 100 and not any(start <= position < end for start, end in conversation.spans)
    ]
    if not context:
        return
    edited = list(conversation.model)
    edited[data.draw(st.sampled_from(context))] = 106
    with pytest.raises(SpliceRefused) as refused:
        splice_of(conversation, model=edited)
    assert refused.value.code == "environment_block_mismatch"


@settings(deadline=None, derandomize=True)
@given(conversations(), st.integers(0, 3))
def test_a_dropped_or_added_turn_is_refused(conversation, num_turns):
    added = [HEADER, 100, EOS, NEWLINE] * (num_turns + 1)
    spans = [(start + len(added), end + len(added)) for start, end in conversation.spans]
    for changes in (
        {"model": added + conversation.model, "spans": spans},
        {"prefix": added + conversation.prefix, "template": added + conversation.template},
    ):
        with pytest.raises(SpliceRefused) as refused:
            splice_of(conversation, **changes)
        assert refused.value.code == "turn_count_mismatch"


@settings(deadline=None, derandomize=True, max_examples=300)
@given(*[st.lists(st.sampled_from([*OPENERS, 5, 6]), max_size=8)] * 3, st.data())
def test_whatever_is_given_a_splice_at_a_turn_start_keeps_the_prefix_or_is_refused(model, prefix, template, data):
    start = data.draw(st.integers(0, len(model)))
    try:
        result = splice_at_turn_start(model, prefix, template, OPENERS, generated_spans=[(start, len(model))])
    except SpliceRefused:
        return
    assert result[: len(model)] == model
    added = result[len(model) :]
    assert template[len(template) - len(added) :] == added
