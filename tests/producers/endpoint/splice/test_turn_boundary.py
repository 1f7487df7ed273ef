"""How turns are told apart is found by rendering a few of them."""

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from chat_templates import STYLES, encode, render, tokenizer_of
from penstock.producers.endpoint.splice.token_ids import SpliceRefused
from penstock.producers.endpoint.splice.turn_boundary import TurnBoundary, find_turn_boundary, special_token_ids


def names(name: str, token_ids: frozenset[int]) -> set[str]:
    return set(tokenizer_of(name).convert_ids_to_tokens(sorted(token_ids)))


def boundary_of(name: str, **arguments) -> TurnBoundary:
    specials = special_token_ids(tokenizer_of(name))
    return find_turn_boundary(lambda messages, prompt: render(name, messages, prompt, **arguments), specials)


@pytest.mark.parametrize("name", STYLES)
def test_the_end_of_an_answer_and_the_control_tokens_are_found(name):
    boundary = boundary_of(name)
    assert names(name, boundary.control_token_ids) == set(STYLES[name].specials)
    if STYLES[name].turn_end is None:
        assert boundary.turn_end_token_id is None
        assert names(name, boundary.turn_start_token_ids) == {"<|user|>", "<|assistant|>", "<|observation|>"}
    else:
        assert [boundary.turn_end_token_id] == encode(name, STYLES[name].turn_end)
        assert not boundary.turn_start_token_ids


def test_the_end_of_a_turn_need_not_be_the_tokenizers_eos():
    """A base model's tokenizer names the end of a text."""
    backend = tokenizer_of("llama3").backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end_of_text|>")
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    assert end not in tokenizer.all_special_ids
    boundary = find_turn_boundary(lambda m, p: render("llama3", m, p), special_token_ids(tokenizer))
    assert boundary.turn_end_token_id == end


def test_what_a_generation_prompt_opens_and_history_drops_is_no_control_token():
    think = frozenset(encode("qwen3", "<think></think>"))
    specials = special_token_ids(tokenizer_of("qwen3")) | think

    def without_thinking(messages, prompt):
        return render("qwen3", messages, prompt, enable_thinking=False)

    assert find_turn_boundary(without_thinking, specials).control_token_ids == specials - think
    assert find_turn_boundary(lambda m, p: render("qwen3", m, p), specials).control_token_ids == specials


def test_a_template_that_knows_no_tools_is_read_without_them():
    def no_tools(messages, prompt):
        if any(message["role"] == "tool" for message in messages):
            raise jinja2.TemplateError("tools are not supported")
        return render("glm", messages, prompt)

    boundary = find_turn_boundary(no_tools, special_token_ids(tokenizer_of("glm")))
    assert names("glm", boundary.turn_start_token_ids) == {"<|user|>", "<|assistant|>"}
    # A turn that it is not known to open would be lost with its token; this is noticed.
    user, assistant, tool = (encode("glm", f"<|{role}|>")[0] for role in ("user", "assistant", "observation"))
    prefix = [user, 300, assistant, 301]
    with pytest.raises(SpliceRefused) as refused:
        boundary.splice([*prefix, tool], prefix, [*prefix, tool, 302, assistant], [(3, 5)])
    assert refused.value.code == "tail_mismatch"


def test_a_template_without_anything_to_count_by_refuses_every_splice():
    def plain(messages, prompt):
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return encode("chatml", text + "assistant:" * prompt)

    boundary = find_turn_boundary(plain, special_token_ids(tokenizer_of("chatml")))
    assert boundary.turn_end_token_id is None and not boundary.turn_start_token_ids
    with pytest.raises(SpliceRefused) as refused:
        boundary.splice([5, 6], [5, 6], [5, 6, 7], [(1, 2)])
    assert refused.value.code == "no_eos_configured"


def test_an_answer_ends_as_the_template_writes_it_or_otherwise():
    for name, usual, other in [
        ("chatml", ["<|im_end|>"], "<|endoftext|>"),
        ("mistral", ["</s>"], "[TOOL_CALLS]"),
        ("glm", ["<|user|>", "<|observation|>"], "<|endoftext|>"),
    ]:
        boundary = boundary_of(name)
        assert not any(boundary.is_alternate_stop(encode(name, token)[0]) for token in usual)
        assert boundary.is_alternate_stop(encode(name, other)[0])
    assert not TurnBoundary().is_alternate_stop(5)
