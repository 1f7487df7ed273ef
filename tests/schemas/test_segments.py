"""From recorded calls to segments: the golden cases, and what holds for every tree of calls."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import penstock.schemas.prefixes
from golden_token_ids import cases
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import (
    Rollout,
    TopLogprobs,
    VersionSpan,
    decode_group,
    encode_group,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from penstock.schemas.routes import Routes
from penstock.schemas.segments import CallError, Chain, RecordedCall, segments
from wire_examples import group


def recorded(case: dict) -> list[RecordedCall]:
    return [
        RecordedCall(
            call_id=call["call_id"],
            t=call["t"],
            prompt_token_ids=pack_ids(call["prompt_token_ids"]),
            generation_token_ids=pack_ids(call["generation_token_ids"]),
            behavior_logprobs=pack_floats(call["generation_log_probs"]),
            version_spans=tuple(VersionSpan(*span) for span in call["versions"]),
            finish_reason=call.get("finish_reason", "stop"),
            delivered=call.get("delivered"),
        )
        for call in case["input"]["calls"]
    ]


def unfolded(chain: Chain) -> dict:
    """A chain as the golden cases write it: everything token by token."""
    token_ids = unpack_ids(chain.segment.token_ids).tolist()
    mask, logprobs, versions = [0] * len(token_ids), [0.0] * len(token_ids), [-1] * len(token_ids)
    sampled = iter(unpack_floats(chain.segment.behavior_logprobs))
    for start, end in chain.segment.loss_mask:
        for position in range(start, end):
            mask[position], logprobs[position] = 1, next(sampled)
    for span in chain.segment.version_spans:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return {
        "call_ids": list(chain.call_ids),
        "token_ids": token_ids,
        "loss_mask": mask,
        "log_probs": [round(logprob, 6) for logprob in logprobs],
        "versions": versions,
    }


@pytest.mark.parametrize("case", cases("segment_cases"))
def test_golden_segments(case):
    if "expected_error" in case:
        with pytest.raises(CallError) as refused:
            segments(recorded(case))
        assert refused.value.code == case["expected_error"]
        return
    chains, dropped = segments(recorded(case))
    assert [unfolded(chain) for chain in chains] == case["expected"]["segments"]
    assert [{"call_id": call.call_id, "reason": call.reason} for call in dropped] == case["expected"]["dropped"]
    assert sum(chain.segment.num_sampled_tokens for chain in chains) == case["trained_tokens"]
    check_wire(chains)


def check_wire(chains: list[Chain]) -> None:
    """The segments are a rollout that the reader of the stream accepts."""
    rollout = Rollout(segments=tuple(chain.segment for chain in chains), reward=Reward(value=1.0))
    assert decode_group(encode_group(replace(group(), rollouts=(rollout,)))).rollouts == (rollout,)


def call(call_id: str, t: int, prompt: list[int], generated: list[int], **fields) -> RecordedCall:
    """A call whose logprobs name its tokens: no two of a test are equal."""
    return RecordedCall(
        call_id=call_id,
        t=t,
        prompt_token_ids=pack_ids(prompt),
        generation_token_ids=pack_ids(generated),
        behavior_logprobs=pack_floats([-(t * 64 + n + 1) / 1024 for n in range(len(generated))]),
        version_spans=(VersionSpan(t, 0, len(generated)),) if generated else (),
        **fields,
    )


def outcome(*calls: RecordedCall) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    chains, dropped = segments(calls)
    return [chain.call_ids for chain in chains], dict(dropped)


def test_an_answer_that_the_client_had_is_trained_even_if_it_asked_again():
    """A harness that draws several answers to one prompt and goes on from one of them."""
    first, second = call("a", 0, [1], [2], delivered=True), call("b", 1, [1], [3], delivered=True)
    following = call("c", 2, [1, 3, 4], [5], delivered=True)
    assert outcome(first, second, following) == ([("a",), ("b", "c")], {})


def test_equal_answers_to_one_prompt_are_two_and_the_later_one_is_continued():
    calls = call("a", 0, [1], [2], delivered=True), call("b", 1, [1], [2]), call("c", 2, [1, 2, 3], [4])
    assert outcome(*calls) == ([("a",), ("b", "c")], {})


def test_a_token_has_the_routes_of_the_call_that_computed_it_first():
    """A row names its call and token: `t` and the place in the call."""

    def routed(name: str, t: int, prompt: list[int], generated: list[int]) -> RecordedCall:
        rows = bytes(byte for place in range(len(prompt) + len(generated) - 1) for byte in (t, place))
        return call(name, t, prompt, generated, routes=Routes(1, 2, "B", rows))

    first, second = routed("a", 0, [1, 2], [3, 4]), routed("b", 1, [1, 2, 3, 4, 9, 9], [5])
    forked = routed("c", 2, [1, 2, 3, 4, 8], [6])
    chains, _ = segments([first, second, forked])
    ids = [bytes([0, 0, 0, 1, 0, 2, t, 3, *own]) for t, own in ((1, (1, 4, 1, 5)), (2, (2, 4)))]
    assert [chain.segment.routes for chain in chains] == [Routes(1, 2, "B", rows) for rows in ids]
    check_wire(chains)


def test_calls_without_context_between_them_are_one_run_with_the_spans_of_both():
    chains, _ = segments([call("a", 0, [1], [2, 3], finish_reason="length"), call("b", 1, [1, 2, 3], [4])])
    (chain,) = chains
    assert chain.segment.loss_mask == ((1, 4),)
    assert chain.segment.version_spans == (VersionSpan(0, 1, 3), VersionSpan(1, 3, 4))
    assert chain.segment.finish_reason == "stop"


def test_a_segment_has_the_masks_and_likeliest_ids_of_the_tokens_that_it_trains():
    def masked(call_id: str, t: int, prompt: list[int], generated: list[int]) -> RecordedCall:
        top = TopLogprobs(1, pack_ids(generated), pack_floats([-float(n) for n in generated]))
        masks = tuple(pack_ids([n, 9]) for n in generated)
        return call(call_id, t, prompt, generated, sampling_mask=masks, top_logprobs=top)

    calls = masked("a", 0, [1], [2]), masked("b", 1, [1, 2, 3], [4, 5]), masked("c", 2, [1, 2, 6], [7])
    chains, _ = segments(calls)
    found = [[list(unpack_ids(kept)) for kept in chain.segment.sampling_mask or ()] for chain in chains]
    assert found == [[[2, 9], [4, 9], [5, 9]], [[7, 9]]]
    assert [chain.segment.top_logprobs for chain in chains] == [
        TopLogprobs(1, pack_ids(ids), pack_floats([-float(n) for n in ids])) for ids in ([2, 4, 5], [7])
    ]
    check_wire(chains)


def test_a_call_that_contradicts_itself_is_refused_by_name():
    for fields, code in [
        ({"prompt_token_ids": b"123"}, "invalid_token_ids"),
        ({"prompt_token_ids": pack_ids([1, -1])}, "invalid_token_ids"),
        ({"generation_token_ids": pack_ids([-1])}, "invalid_token_ids"),
        ({"behavior_logprobs": b""}, "logprob_length_mismatch"),
        ({"version_spans": ()}, "version_spans_mismatch"),
        ({"version_spans": (VersionSpan(3, 0, 2),)}, "version_spans_mismatch"),
        ({"version_spans": (VersionSpan(3, 0, 0), VersionSpan(3, 0, 1))}, "version_spans_mismatch"),
        ({"generation_token_ids": b"", "behavior_logprobs": b""}, "version_spans_mismatch"),
    ]:
        with pytest.raises(CallError, match="call 'a'") as refused:
            segments([replace(call("a", 0, [1], [2]), **fields)])
        assert refused.value.code == code, fields
    with pytest.raises(CallError, match="'a'") as refused:
        segments([call("a", 0, [1], [2]), call("a", 1, [1, 2], [3])])
    assert refused.value.code == "duplicate_call_id"


def test_a_linear_conversation_costs_as_much_as_its_prompts_are_long(monkeypatch):
    """Fifty calls, each of which continues the one before: no call is compared with each of the others."""
    compared = 0

    def counting(left, right):
        nonlocal compared
        compared += len(left)
        return shared(left, right)

    shared = penstock.schemas.prefixes.num_shared
    monkeypatch.setattr(penstock.schemas.prefixes, "num_shared", counting)
    calls, ids = [], []
    for t in range(50):
        prompt = [*ids, *range(100)]
        calls.append(call(str(t), t, prompt, [7] * 20))
        ids = [*prompt, *([7] * 20)]
    assert outcome(*calls) == ([tuple(str(t) for t in range(50))], {})
    assert compared <= sum(len(c.prompt_token_ids) + len(c.generation_token_ids) for c in calls)


# What holds for every tree of calls

few_ids = st.lists(st.integers(0, 2), max_size=3)


@st.composite
def call_trees(draw) -> list[RecordedCall]:
    """Calls that begin anew, continue earlier ones, ask again, or lost a token of the history; few ids, so that
    sequences agree by chance as well."""
    calls: list[RecordedCall] = []
    for t in range(draw(st.integers(1, 9))):
        prompt = draw(few_ids)
        if calls:
            earlier = draw(st.sampled_from(calls))
            seen = unpack_ids(earlier.prompt_token_ids).tolist()
            answer = unpack_ids(earlier.generation_token_ids).tolist()
            match draw(st.sampled_from(["anew", "again", "on", "on", "on", "edited"])):
                case "again":
                    prompt = seen
                case "on":
                    prompt = seen + answer + prompt
                case "edited":
                    history = seen + answer
                    lost = draw(st.integers(0, len(history)))
                    prompt = history[:lost] + history[lost + 1 :] + prompt
        calls.append(
            call(
                f"c{t}",
                draw(st.integers(0, 9)),
                prompt,
                draw(few_ids),
                delivered=draw(st.sampled_from([None, None, True, False])),
                finish_reason=draw(st.sampled_from(["stop", "length"])),
            )
        )
    # Logprobs that tell every sampled token from every other.
    return [
        replace(made, behavior_logprobs=pack_floats([-(n * 8 + k + 1) / 1024 for k in range(_num_sampled(made))]))
        for n, made in enumerate(calls)
    ]


def _num_sampled(made: RecordedCall) -> int:
    return len(made.generation_token_ids) // 4


def sampled_tokens(made: RecordedCall) -> Counter:
    """Each token as the engine sampled it: the ids before it, its own, its logprob and its version."""
    prompt, answer = unpack_ids(made.prompt_token_ids).tolist(), unpack_ids(made.generation_token_ids).tolist()
    logprobs = unpack_floats(made.behavior_logprobs)
    versions = [span.version for span in made.version_spans for _ in range(span.start, span.end)]
    return Counter(
        (tuple(prompt + answer[:n]), token_id, logprobs[n], versions[n]) for n, token_id in enumerate(answer)
    )


def trained_tokens(chain: Chain) -> Counter:
    shown = unfolded(chain)
    logprobs = iter(unpack_floats(chain.segment.behavior_logprobs))
    return Counter(
        (tuple(shown["token_ids"][:n]), token_id, next(logprobs), shown["versions"][n])
        for n, token_id in enumerate(shown["token_ids"])
        if shown["loss_mask"][n]
    )


@settings(deadline=None, derandomize=True, max_examples=400)
@given(call_trees())
def test_every_sampled_token_is_trained_once_after_exactly_the_ids_that_the_engine_was_given(calls):
    chains, dropped = segments(calls)
    lost = {gone.call_id for gone in dropped}
    kept = [made for made in calls if made.call_id not in lost]
    trained = sum((trained_tokens(chain) for chain in chains), Counter())
    assert trained == sum((sampled_tokens(made) for made in kept), Counter())
    assert sum(chain.segment.num_sampled_tokens for chain in chains) == sum(map(_num_sampled, kept))
    assert {call_id for chain in chains for call_id in chain.call_ids} == {made.call_id for made in kept}
    if chains:
        check_wire(chains)


@settings(deadline=None, derandomize=True)
@given(call_trees(), st.randoms(use_true_random=False))
def test_the_order_in_which_calls_are_given_changes_nothing(calls, random_source: random.Random):
    shuffled = list(calls)
    random_source.shuffle(shuffled)
    assert segments(shuffled) == segments(calls)
