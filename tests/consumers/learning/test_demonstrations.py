"""Demonstrations as tokens: what is trained on, and what is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chat_templates import encode, render, tokenizer_of
from penstock.consumers.learning.learner.demonstrations import read_demonstrations
from penstock.schemas.config import ConfigError, RunConfig, SamplingConfig, WarmStartConfig
from penstock.schemas.rollout import Segment, unpack_ids
from training_groups import configuration

USER = {"role": "user", "content": "what is three plus four"}
SEVEN = {"role": "assistant", "content": "the answer is seven"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}],
}
RESULT = {"role": "tool", "content": "seven"}
THOUGHT = SEVEN | {"reasoning_content": "three plus four makes seven"}


def _config(tmp_path: Path, style: str, *lines: Any, **changes: Any) -> RunConfig:
    tokenizer_of(style).save_pretrained(tmp_path / "model")
    if style == "glm":  # as that family does: the mark of the next speaker ends a turn
        ends = [encode(style, mark)[0] for mark in ("<|user|>", "<|observation|>")]
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    file = tmp_path / "demonstrations.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    changes = {"warm_start": WarmStartConfig(demonstrations=str(file))} | changes
    return configuration(tmp_path / "model", **changes)


def _taught(style: str, segment: Segment) -> list[str]:
    """Returns the texts of a sequence's turns."""
    ids = unpack_ids(segment.token_ids).tolist()
    return [tokenizer_of(style).decode(ids[start:end]) for start, end in segment.loss_mask]


@pytest.mark.parametrize(
    ("style", "messages", "expected"),
    [
        ("chatml", [USER, SEVEN], [["the answer is seven<|im_end|>"]]),
        ("chatml", [USER, SEVEN, USER, SEVEN], [["the answer is seven<|im_end|>"] * 2]),
        ("llama3", [USER, SEVEN], [["the answer is seven<|eot_id|>"]]),
        ("mistral", [USER, SEVEN], [["the answer is seven</s>"]]),
        ("glm", [USER, SEVEN, USER, SEVEN], [["\n<think></think>\nthe answer is seven<|user|>"] * 2]),
        (
            "chatml",
            [USER, CALL, RESULT, SEVEN],
            [
                [
                    '\n<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>',
                    "the answer is seven<|im_end|>",
                ]
            ],
        ),
        # Earlier reasoning is left out: each turn has a sequence of its own.
        (
            "qwen3",
            [USER, THOUGHT, USER, THOUGHT],
            [["<think>\nthree plus four makes seven\n</think>\n\nthe answer is seven<|im_end|>"]] * 2,
        ),
    ],
)
def test_the_turns_of_the_assistant_are_taught_up_to_their_end(tmp_path, style, messages, expected):
    (found,) = read_demonstrations(_config(tmp_path, style, {"messages": messages}), 10_000)
    assert [_taught(style, segment) for segment in found] == expected
    ids, last = unpack_ids(found[-1].token_ids).tolist(), found[-1].loss_mask[-1][0]
    decoded = [dict(message) for message in messages]
    for message in decoded:
        if message.get("tool_calls"):
            function = {"name": "add", "arguments": {"a": 3, "b": 4}}
            message["tool_calls"] = [{"type": "function", "function": function}]
    assert ids[:last] == render(style, decoded[:-1], True), "the context is what the engine would read"
    assert found[-1].num_sampled_tokens == sum(end - start for start, end in found[-1].loss_mask)


def test_variables_of_the_template_tools_and_other_ends_are_those_of_the_run(tmp_path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    config = _config(tmp_path, "chatml", {"messages": [USER, SEVEN], "tools": tools, "source": "a book"})
    (found,) = read_demonstrations(config, 10_000)[0]
    assert unpack_ids(found.token_ids).tolist()[: found.loss_mask[0][0]] == render("chatml", [USER], True, tools=tools)
    (answer,) = encode("chatml", " answer")
    config = msgspec.structs.replace(config, sampling=SamplingConfig(stop_token_ids=(answer,)))
    ((found,),) = read_demonstrations(config, 10_000)
    assert _taught("chatml", found) == ["the answer"]


def test_the_role_developer_is_the_systems_as_in_requests_of_agents(tmp_path):
    told = [{"role": role, "content": "you add"} for role in ("developer", "system")]
    config = _config(tmp_path, "chatml", *({"messages": [one, USER, SEVEN]} for one in told))
    (first,), (second,) = read_demonstrations(config, 10_000)
    assert first.token_ids == second.token_ids


def test_texts_are_taught_with_the_end_of_sequence(tmp_path):
    config = _config(tmp_path, "chatml", {"prompt": "three plus", "completion": " four"}, "")
    ((found,),) = read_demonstrations(config, 10_000)
    assert _taught("chatml", found) == [" four<|im_end|>"]
    assert unpack_ids(found.token_ids).tolist()[:-2] == encode("chatml", "three plus")


def test_texts_need_an_end_of_sequence(tmp_path):
    config = _config(tmp_path, "chatml", {"prompt": "three plus", "completion": " four"}, "")
    file = Path(config.model.path) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))
    with pytest.raises(ConfigError, match="line 1: the model's tokenizer has no end of sequence to end a completion"):
        read_demonstrations(config, 10_000)


BAD = {
    "not JSON": ('{"messages": [', "line 1: not JSON"),
    "no object": ("[1]", r"line 1: \[1\]; expected an object with `messages`"),
    "neither form": ('{"text": "a"}', "line 1: .*expected `messages`, or the texts `prompt` and `completion`"),
    "no messages": ({"messages": []}, r"line 1: messages = \[\]: expected a list"),
    "no role": ({"messages": [{"content": "a"}]}, r"line 1: messages\[0\] = .*expected an object with `role`"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, SEVEN]},
        r"line 1: messages\[0\].content = .*expected a text",
    ),
    "no assistant": ({"messages": [USER]}, "line 1: no message of the role 'assistant'"),
    "too long": ({"messages": [USER, SEVEN] * 9}, "line 1: 1.. tokens; expected at most 60"),
    "empty": ("\n", "it is empty"),
}


@pytest.mark.parametrize(("line", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_taught_is_refused_by_its_line(tmp_path, line, message):
    with pytest.raises(ConfigError, match=rf"^warm_start.demonstrations = '.*jsonl': {message}"):
        read_demonstrations(_config(tmp_path, "chatml", line), 60)


def test_a_template_whose_prompt_is_not_continued_by_the_turn_is_refused(tmp_path):
    """The prompt without thinking ends with an empty thought, which the turn lacks."""
    config = _config(tmp_path, "qwen3", {"messages": [USER, SEVEN]})
    model = msgspec.structs.replace(config.model, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(
        ConfigError, match=r"line 1: messages\[1\]: its rendering does not continue that of the messages"
    ):
        read_demonstrations(msgspec.structs.replace(config, model=model), 10_000)


def test_a_template_that_never_ends_a_turn_is_refused(tmp_path):
    config = _config(tmp_path, "chatml", {"messages": [USER, SEVEN]})
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with pytest.raises(ConfigError, match=r"line 1: messages\[1\]: .* no token after this turn at which a completion"):
        read_demonstrations(config, 10_000)


def test_a_missing_file_is_named(tmp_path):
    config = _config(tmp_path, "chatml", "", warm_start=WarmStartConfig(demonstrations="nowhere.jsonl"))
    with pytest.raises(ConfigError, match=r"warm_start.demonstrations = 'nowhere.jsonl': No such file"):
        read_demonstrations(config, 10_000)
