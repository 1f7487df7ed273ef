"""Which call a request continues."""

import contextlib
import random

import msgspec
import pytest

from penstock.producers.endpoint.call_ledger import Call, CallLedger
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.messages import canonical_form, for_template
from penstock.producers.interfaces import Completion
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import Rollout, SamplingSettings, TopLogprobs, VersionSpan, pack_floats, pack_ids
from penstock.schemas.segments import segments

USER = {"role": "user", "content": "what is 3 + 4?"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "7"}
ANSWER = {"role": "assistant", "content": "seven"}


def call(
    ledger: CallLedger,
    context: list[int],
    sampled: list[int],
    base: Call | None = None,
    *,
    top_k: int = 0,
    top: int = 0,
    request: bytes = b"",
) -> Call:
    completion = Completion(
        token_ids=pack_ids(sampled),
        behavior_logprobs=pack_floats([-0.5] * len(sampled)),
        version_spans=(VersionSpan(3, 0, len(sampled)),),
        finish_reason="stop",
        sampling_mask=tuple(pack_ids(range(n, n + top_k)) for n in sampled) if top_k else None,
        top_logprobs=TopLogprobs(top, bytes(4 * top * len(sampled)), bytes(4 * top * len(sampled))) if top else None,
    )
    number = ledger.begin(request)
    return Call(number=number, base=base, context=pack_ids(context), completion=completion, rendered=None)


@pytest.fixture
def ledger() -> CallLedger:
    """A call with a tool, its result, and an answer."""
    ledger = CallLedger()
    ledger.record(call(ledger, [1, 2], [3, 4], request=b"request"), [USER], CALLING)
    ledger.record(call(ledger, [1, 2, 3, 4, 5], [6]), [USER, CALLING, RESULT], ANSWER)
    return ledger


def test_the_longest_conversation_that_a_request_begins_with_is_its_parent(ledger: CallLedger) -> None:
    first, second = ledger.calls
    assert ledger.parent([USER, CALLING, RESULT, ANSWER, USER]) == (second, 3)
    assert ledger.parent([USER, CALLING, RESULT]) == (first, 1)
    assert ledger.parent([USER, CALLING, {**RESULT, "content": "8"}, ANSWER, USER]) == (first, 1)
    assert ledger.parent([USER]) is None
    assert ledger.parent([RESULT, CALLING, USER]) is None
    assert ledger.parent([{**USER, "content": "what is 3+4?"}, CALLING, RESULT]) is None


def test_what_clients_do_to_messages_on_their_way_does_not_hide_the_parent(ledger: CallLedger) -> None:
    """Arguments spaced otherwise, content in parts, fields dropped and added, white space of an answer trimmed,
    reasoning left out."""
    spaced = {"name": "add", "arguments": '{"b":4,"a":3}'}
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "3 + 4?"}]},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": [{"id": "other", "function": spaced}]},
        {**RESULT, "name": "add"},
        {**ANSWER, "content": "seven\n"},
        USER,
    ]
    assert ledger.parent(sent) == (ledger.calls[1], 3)
    ledger.record(call(ledger, [1, 2], [7]), [USER], {"role": "assistant", "content": "eight", "reasoning": "easy"})
    assert ledger.parent([USER, {"role": "assistant", "content": "eight"}, USER]) == (ledger.calls[2], 1)


def test_a_message_with_token_ids_is_the_answer_that_had_them_whatever_its_text(ledger: CallLedger) -> None:
    first, second = ledger.calls
    named = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -0.5]}
    edited = {"role": "assistant", "content": "edited", **named}
    assert ledger.parent([USER, edited, USER]) == (first, 1)
    assert ledger.parent([USER, edited, RESULT, ANSWER, USER]) == (second, 3)
    assert ledger.parent([USER, {**CALLING, **named}, RESULT, ANSWER, USER]) == (second, 3)


def test_token_ids_do_not_vouch_for_what_stands_before_them(ledger: CallLedger) -> None:
    """An answer that was edited without its ids, before one that has them, is an edited history."""
    named = {"generation_token_ids": [6], "generation_log_probs": [-0.5], "prompt_token_ids": [1, 2, 3, 4, 5]}
    answer = {**ANSWER, **named}
    assert ledger.parent([USER, CALLING, RESULT, answer, USER]) == (ledger.calls[1], 3)
    assert ledger.parent([USER, {"role": "assistant", "content": "edited"}, RESULT, answer, USER]) is None
    assert ledger.parent([USER, CALLING, {**RESULT, "content": "8"}, answer, USER]) == (ledger.calls[0], 1)


def test_token_ids_that_the_rollout_has_not_seen_are_a_conflict(ledger: CallLedger) -> None:
    for prompt, sampled, logprobs, status, code in [
        ([1, 2], [3, 5], [0, 0], 409, "unknown_token_ids"),
        ([2**40], [3], [0], 400, "invalid_token_ids"),
        (["1"], [3], [0], 400, "invalid_token_ids"),
        ("12", [-1], [0], 400, "invalid_token_ids"),
        ([1], [3], [], 400, "logprob_length_mismatch"),
        ([1, 2], [3, 4], None, 400, "partial_token_metadata"),
    ]:
        fields = {"prompt_token_ids": prompt, "generation_token_ids": sampled, "generation_log_probs": logprobs}
        with pytest.raises(ApiError) as caught:
            ledger.parent([USER, {**ANSWER, **fields}, USER])
        assert (caught.value.status, caught.value.code) == (status, code)


def test_templates_get_text_and_parsed_arguments_and_no_token_ids() -> None:
    sent = {
        **CALLING,
        "reasoning": "easy",
        "prompt_token_ids": [1],
        "generation_token_ids": [2],
        "generation_log_probs": [-1],
    }
    (rendered,) = for_template([sent])
    assert rendered["content"] == "" and rendered["tool_calls"][0]["function"]["arguments"] == {"a": 3, "b": 4}
    assert rendered["reasoning_content"] == rendered["reasoning"] == "easy"
    assert not any(name.endswith(("token_ids", "log_probs")) for name in rendered)


def test_a_call_with_broken_arguments_stays_in_the_history() -> None:
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": '}}]}
    assert for_template([broken])[0]["tool_calls"][0]["function"]["arguments"] == {}
    whole = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    assert canonical_form(broken) != canonical_form(whole)


def test_an_answer_that_was_lost_on_the_way_gives_way_to_the_same_one_that_arrived(ledger: CallLedger) -> None:
    ledger.calls[0].delivered = True
    ledger.record(call(ledger, [1, 2], [3, 4]), [USER], CALLING)
    ledger.record(call(ledger, [1, 2], [3, 9]), [USER], CALLING)
    assert [recorded.call_id for recorded in ledger.recorded()] == ["0", "1", "3"]


def test_calls_that_their_agent_spells_out_as_text_are_the_answer_whose_ids_they_name() -> None:
    def calling(*ids: str, content: str | None = None) -> dict:
        calls = [{"id": each, "function": {"name": "add", "arguments": "{}"}} for each in ids]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    ledger, observed = CallLedger(), {"role": "user", "content": "Observation:\n7"}
    ledger.record(call(ledger, [1, 2], [3, 4]), [USER], calling("abcdefg12", "abcdefg13", content="let me see\n"))
    (made,) = ledger.calls
    spelled = "let me see\nCalling tools:\n[{'id': 'abcdefg12', 'name': 'add'}, {'id': 'abcdefg13', 'name': 'add'}]"
    assert ledger.parent([USER, {"role": "assistant", "content": spelled}, observed]) == (made, 1)
    ledger.record(call(ledger, [5], [6], made), [USER, {"role": "assistant", "content": spelled}, observed], ANSWER)
    assert ledger.parent([USER, {"role": "assistant", "content": spelled}, observed, ANSWER, USER]) == (
        ledger.calls[1],
        3,
    )
    for edited in (
        spelled.replace("let", "Let"),
        spelled.replace("abcdefg13", "abcdefg14"),
        spelled.replace("add", "sub"),
    ):
        assert ledger.parent([USER, {"role": "assistant", "content": edited}, observed]) is None
    assert ledger.parent([USER, calling("abcdefg12", "abcdefg13", content="edited"), observed]) is None
    assert ledger.parent([{**USER, "content": "x"}, {"role": "assistant", "content": spelled}, observed]) is None


def test_an_answer_in_which_the_model_itself_quotes_a_call_is_that_answer() -> None:
    ledger, quoting = CallLedger(), {"role": "assistant", "content": "abcdefg12 was add"}
    made = {"id": "abcdefg12", "function": {"name": "add", "arguments": "{}"}}
    ledger.record(call(ledger, [1, 2], [3, 4]), [USER], {"role": "assistant", "content": None, "tool_calls": [made]})
    ledger.record(call(ledger, [1, 2], [5]), [USER], quoting)
    assert ledger.parent([USER, quoting, USER]) == (ledger.calls[1], 1)


def test_an_answer_that_a_later_call_continues_was_read_whatever_its_client_counts(ledger: CallLedger) -> None:
    for made in ledger.calls:
        made.delivered = True
    ledger.begin(b"request", is_retry=True)
    assert [recorded.delivered for recorded in ledger.recorded()] == [False, True]
    ((chain,), dropped) = segments(ledger.recorded())
    assert not dropped and chain.segment.loss_mask == ((2, 4), (5, 6))


def test_calls_fit_in_the_record_that_they_were_let_in_for() -> None:
    """Chains, branches and conversations of their own: what the ledger counts is no less than what is encoded."""
    chance = random.Random(7)
    for top_k, top in [(0, 0), (20, 0), (100, 0), (0, 20)] * 30:
        ledger = CallLedger(20_000, SamplingSettings(top_k=top_k, top_logprobs=top).token_bytes)
        with contextlib.suppress(ApiError):
            while True:
                base = chance.choice([None, *ledger.calls])
                context = [chance.randrange(1000) for _ in range(chance.randrange(1, 60))]
                num_prompt = len(context) + (len(base.token_ids) if base is not None else 0)
                num_sampled = min(ledger.room(base, num_prompt, {}), chance.randrange(1, 60))
                made = call(ledger, context, list(range(num_sampled)), base, top_k=top_k, top=top)
                ledger.record(made, [{"role": "user", "content": str(made.number)}], ANSWER)
                made.delivered = True
        chains, _ = segments(ledger.recorded())
        rollout = Rollout(segments=tuple(chain.segment for chain in chains), reward=Reward(value=1.0))
        assert 10_000 < ledger.num_bytes <= 20_000
        assert len(msgspec.msgpack.encode(rollout)) <= ledger.num_bytes


def test_a_rollout_that_is_full_takes_no_call_more() -> None:
    ledger = CallLedger(600)
    first = call(ledger, [1] * 10, [2] * 10)
    beside = call(ledger, [3] * 10, [2] * 20)
    assert ledger.room(None, 10, {}) > 20
    ledger.record(first, [USER], ANSWER)
    for refused in (lambda: ledger.record(beside, [USER], ANSWER), lambda: ledger.room(None, 30, {})):
        with pytest.raises(ApiError, match="396 of the 600 bytes") as caught:
            refused()
        assert (caught.value.status, caught.value.code) == (400, "rollout_too_large")
    assert ledger.calls == [first]
