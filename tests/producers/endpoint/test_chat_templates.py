"""The whole way, through chat templates of five families: messages, an answer sampled in other tokens than its text
encodes to, the next turn's messages, and the prompt that continues the model's own tokens."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import ANSWER, QUESTION, STYLES, decode, drifted, encode, render, render_text, tokenizer_of
from penstock.producers.endpoint.splice.suffix_encoding import SuffixEncoder
from penstock.producers.endpoint.splice.token_ids import SpliceRefused
from penstock.producers.endpoint.splice.turn_boundary import TurnBoundary, find_turn_boundary, special_token_ids
from penstock.schemas.rollout import VersionSpan, pack_floats, pack_ids, unpack_ids
from penstock.schemas.segments import RecordedCall, segments

Message = dict[str, Any]
ARGUMENTS = {"a": 3, "b": 4}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
START = [{"role": "system", "content": "the system"}, {"role": "user", "content": QUESTION}]
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "seven"}
MORE = {"role": "user", "content": "what is the answer"}


def boundary_of(name: str) -> TurnBoundary:
    specials = special_token_ids(tokenizer_of(name))
    return find_turn_boundary(lambda messages, prompt: render(name, messages, prompt), specials)


class PlayedConversation:
    """A conversation of one harness and one model: what was said, and the ids that the model saw and sampled."""

    def __init__(self, name: str, messages: list[Message]) -> None:
        self.name = name
        self.messages = copy.deepcopy(messages)
        self.boundary = boundary_of(name)
        self.model = render(name, messages, True)
        self.spans: list[tuple[int, int]] = []

    def sample(self, token_ids: list[int], message: Message) -> None:
        """The model samples; the harness keeps `message`, what it made of the text."""
        self.spans.append((len(self.model), len(self.model) + len(token_ids)))
        self.model = self.model + token_ids
        self.messages.append({"role": "assistant", **message})
        self.num_said = len(self.messages)

    def next_prompt(self, *added: Message) -> list[int]:
        self.messages.extend(added)
        prefix = render(self.name, self.messages[: self.num_said], False)
        template = render(self.name, self.messages, True)
        return self.boundary.splice(self.model, prefix, template, self.spans)

    def refusal(self, *added: Message) -> str:
        with pytest.raises(SpliceRefused) as refused:
            self.next_prompt(*added)
        return refused.value.code


def turn_end(name: str, next_turn: str) -> str:
    """The ids after the text of an answer: its end, or without one the opening of the next turn."""
    end = STYLES[name].turn_end
    return end if end is not None else next_turn[: next_turn.index("|>") + 2]


def rest_after(name: str, next_turn: str, *, ended: bool) -> list[int]:
    """Returns what a prompt writes after an answer that sampled its end, or was cut before it."""
    whole = (STYLES[name].turn_end or "") + next_turn
    return encode(name, whole[len(turn_end(name, next_turn)) :] if ended else whole)


def sampled_call(name: str) -> str:
    style = STYLES[name]
    return style.tool_call.replace("{}", style.call(ARGUMENTS))


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("name", STYLES)
def test_a_tool_call_in_other_words_stays_as_it_was_sampled(name, ended):
    """The harness parsed it; the template writes other spaces and another order."""
    tool_turn = STYLES[name].tool_turn.replace("{}", RESULT["content"])
    played = PlayedConversation(name, START)
    played.sample(
        encode(name, sampled_call(name) + turn_end(name, tool_turn) * ended), {"content": None, "tool_calls": [CALL]}
    )
    prompt = played.next_prompt(RESULT)
    assert prompt == played.model + rest_after(name, tool_turn, ended=ended)
    assert decode(name, prompt) != render_text(name, played.messages, True)
    # And a third call keeps both answers.
    user_turn = STYLES[name].user_turn.replace("{}", MORE["content"])
    played.model = prompt
    played.sample(drifted(name, ANSWER), {"content": ANSWER})
    prompt = played.next_prompt(MORE)
    assert prompt == played.model + rest_after(name, user_turn, ended=False)
    assert sampled_call(name) in decode(name, prompt) and ANSWER in decode(name, prompt)


@pytest.mark.parametrize("name", [name for name in STYLES if STYLES[name].reasoning])
def test_reasoning_that_a_user_turn_strips_from_the_template_stays_in_the_prompt(name):
    reasoning = STYLES[name].reasoning.replace("{}", "three plus four")
    user_turn = STYLES[name].user_turn.replace("{}", MORE["content"])
    played = PlayedConversation(name, START)
    said = {"content": ANSWER, "reasoning_content": "three plus four"}
    played.sample(drifted(name, reasoning + ANSWER) + encode(name, turn_end(name, user_turn)), said)
    assert "three plus four</" in render_text(name, played.messages, False).replace("\n", "")
    prompt = played.next_prompt(MORE)
    assert "three plus four</" not in render_text(name, played.messages, True).replace("\n", "")
    assert prompt == played.model + rest_after(name, user_turn, ended=True)
    assert reasoning + ANSWER in decode(name, prompt)
    # As sent, the same call opens a second segment, and the first keeps what was sampled.
    (start, end), as_sent = played.spans[0], render(name, played.messages, True)
    chains, _ = segments(
        [recorded(0, played.model[:start], played.model[start:end]), recorded(1, as_sent, encode(name, ANSWER))]
    )
    assert [chain.call_ids for chain in chains] == [("0",), ("1",)]


@pytest.mark.parametrize("name", STYLES)
def test_an_edit_of_what_the_model_was_given_and_dropped_or_foreign_turns_are_refused(name):
    def begun() -> PlayedConversation:
        played = PlayedConversation(name, START)
        played.sample(drifted(name, ANSWER), {"content": ANSWER})
        return played

    for place in (0, 1):
        edited = begun()
        edited.messages[place]["content"] += " now"
        assert edited.refusal(MORE) == "environment_block_mismatch"
    tool_turn = STYLES[name].tool_turn.replace("{}", RESULT["content"])
    edited = PlayedConversation(name, START)
    edited.sample(encode(name, sampled_call(name) + turn_end(name, tool_turn)), {"content": None, "tool_calls": [CALL]})
    edited.model = edited.next_prompt(dict(RESULT))
    edited.sample(drifted(name, ANSWER), {"content": ANSWER})
    edited.messages[3]["content"] = "eight"
    assert edited.refusal(MORE) == "environment_block_mismatch"
    dropped = begun()
    dropped.model = dropped.next_prompt(MORE)
    dropped.sample(drifted(name, ANSWER), {"content": ANSWER})
    del dropped.messages[1:3]
    dropped.num_said -= 2
    assert dropped.refusal(MORE) == "turn_count_mismatch"
    foreign = begun()
    foreign.messages += [MORE, {"role": "assistant", "content": "so says another model"}]
    foreign.num_said = len(foreign.messages)
    assert foreign.refusal(MORE) == "turn_count_mismatch"


# Any conversation


def recorded(t: int, prompt: list[int], sampled: list[int]) -> RecordedCall:
    return RecordedCall(
        call_id=str(t),
        t=t,
        prompt_token_ids=pack_ids(prompt),
        generation_token_ids=pack_ids(sampled),
        behavior_logprobs=pack_floats([-0.5] * len(sampled)),
        version_spans=(VersionSpan(t, 0, len(sampled)),) if sampled else (),
        delivered=True,
    )


@st.composite
def sayings(draw, specials: tuple[str, ...]) -> str:
    """A text, which may hold the names of special tokens."""
    words = st.sampled_from([*ANSWER.split(), *specials, "\n", " ", "é", "🦊", "{", "  "])
    return "".join(draw(st.lists(words, max_size=6)))


@pytest.mark.parametrize("name", STYLES)
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_no_conversation_loses_a_sampled_token(name, data):
    """Four calls with drifted, cut and re-rendered answers and edited histories: a splice keeps the model's tokens and
    the template's rest; where it is refused the call opens a segment; what is encoded by suffix is what is encoded."""
    boundary, encoder = boundary_of(name), SuffixEncoder(tokenizer_of(name))
    specials = [*STYLES[name].specials, *STYLES[name].words]
    saying = sayings(tuple(specials))
    ends = [encode(name, special) for special in STYLES[name].specials]
    messages: list[Message] = [{"role": "user", "content": data.draw(saying)}]
    known = encoder.encode(render_text(name, messages, True))
    prompt, spans, calls = known.token_ids, [], []
    num_spliced = 0
    for t in range(4):
        text = data.draw(saying)
        sampled = drifted(name, text, data.draw(st.integers(1, 3)))
        sampled = sampled[: data.draw(st.integers(0, len(sampled)))] + data.draw(st.sampled_from([[], *ends]))
        calls.append(recorded(t, prompt, sampled))
        spans = [*spans, (len(prompt), len(prompt) + len(sampled))]
        model = prompt + sampled
        messages.append({"role": "assistant", "content": tokenizer_of(name).decode(sampled, skip_special_tokens=True)})
        num_said = len(messages)
        messages.append({"role": "user", "content": data.draw(saying)})
        if data.draw(st.integers(0, 3)) == 0:
            messages[data.draw(st.integers(0, num_said - 1))]["content"] += " now"
        prefix = encoder.encode(render_text(name, messages[:num_said], False), known)
        known = encoder.encode(render_text(name, messages, True), prefix)
        assert prefix.token_ids == encode(name, prefix.text)
        assert known.token_ids == encode(name, known.text)
        try:
            spliced = boundary.splice(model, prefix.token_ids, known.token_ids, spans)
        except SpliceRefused:
            prompt, spans = known.token_ids, []
        else:
            prompt = spliced
            num_spliced += 1
            assert prompt[: len(model)] == model
            rest = prompt[len(model) :]
            assert known.token_ids[len(known.token_ids) - len(rest) :] == rest
    chains, dropped = segments(calls)
    assert [gone.call_id for gone in dropped] == [call.call_id for call in calls if not call.generation_token_ids]
    trained = sum(chain.segment.num_sampled_tokens for chain in chains)
    assert trained == sum(len(call.generation_token_ids) // 4 for call in calls)
    if num_spliced == 4 and chains:
        assert len(chains) == 1
    for chain in chains:
        ids = unpack_ids(chain.segment.token_ids).tolist()
        for call_id in chain.call_ids:
            seen = unpack_ids(calls[int(call_id)].prompt_token_ids + calls[int(call_id)].generation_token_ids).tolist()
            assert ids[: len(seen)] == seen
