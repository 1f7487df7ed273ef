"""The engine's prompts, template by template: the tokens it saw and sampled, unless the history was edited."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from chat_templates import CHATML_TURNS, QWEN3_TURNS, STYLES, decode, encode, render, tokenizer_of
from penstock.producers.endpoint.call_ledger import Call, CallLedger
from penstock.producers.endpoint.chat.answers import Answers, ParsedAnswer
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.producers.endpoint.chat.requests import ChatRequest, parse_chat
from penstock.producers.endpoint.prompts import Prompts, RenderedPrompt
from penstock.producers.interfaces import Completion
from penstock.schemas.config import ConfigError
from penstock.schemas.rollout import SamplingSettings, VersionSpan, pack_floats, pack_ids

ROOT = Path(__file__).parents[3]
STYLE_NAMES = sorted(STYLES)
ASKED = [{"role": "user", "content": "what is three plus four"}]
MORE = {"role": "user", "content": "the tool says so"}
TEXT = "therefore seven"


def request(messages: list[dict], **fields: object) -> ChatRequest:
    return parse_chat({"messages": messages, **fields}, SamplingSettings())


def prompts(style: str) -> Prompts:
    return Prompts(tokenizer_of(style), stop_token_ids=())


def letters(style: str, text: str) -> list[int]:
    """Ids that decode to `text`, and are not those it encodes to."""
    ids = [token for letter in text for token in encode(style, letter)]
    assert ids != encode(style, text)
    return ids


def answered(ledger: CallLedger, prompt: RenderedPrompt, messages: list[dict], ids: list[int], reply: dict) -> Call:
    """Records that the engine sampled `ids` after `prompt`."""
    completion = Completion(
        token_ids=pack_ids(ids),
        behavior_logprobs=pack_floats([-1.0] * len(ids)),
        version_spans=(VersionSpan(0, 0, len(ids)),),
        finish_reason="stop",
    )
    known = len(prompt.base.token_ids) if prompt.base is not None else 0
    call = Call(
        number=ledger.begin(),
        base=prompt.base,
        context=pack_ids(prompt.token_ids[known:]),
        completion=completion,
        rendered=prompt.rendered,
    )
    ledger.record(call, messages, reply)
    return call


def end(style: str) -> list[int]:
    turn_end = STYLES[style].turn_end
    return encode(style, turn_end or "<|user|>")


def opening(style: str) -> list[int]:
    """Returns what a model of this family writes before its answer's text."""
    return encode(style, "\n<think></think>\n") if style == "glm" else []


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_an_answer_sampled_otherwise_than_its_text_encodes_stays_as_sampled(style: str) -> None:
    served, ledger = prompts(style), CallLedger()
    first = served.prompt(request(ASKED), ledger)
    sampled = [*opening(style), *letters(style, TEXT), *end(style)]
    call = answered(ledger, first, ASKED, sampled, {"role": "assistant", "content": TEXT})
    messages = [*ASKED, {"role": "assistant", "content": TEXT}, MORE]
    second = served.prompt(request(messages), ledger)
    assert (second.kind, second.reason, second.parent) == ("drifted", "", call)
    assert second.token_ids[: len(call.token_ids)] == call.token_ids
    rendered = render(style, messages, True)
    rest = second.token_ids[len(call.token_ids) :]
    assert rendered[len(rendered) - len(rest) :] == rest and second.token_ids != rendered


def test_an_answer_as_the_template_writes_it_is_continued_without_drift() -> None:
    served, ledger = prompts("chatml"), CallLedger()
    sampled = [*encode("chatml", TEXT), *end("chatml")]
    answered(ledger, served.prompt(request(ASKED), ledger), ASKED, sampled, {"role": "assistant", "content": TEXT})
    messages = [*ASKED, {"role": "assistant", "content": TEXT}, MORE]
    second = served.prompt(request(messages), ledger)
    assert second.kind == "spliced" and second.token_ids == render("chatml", messages, True)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "another task"}], "new_conversation"),
        ([*ASKED, {"role": "assistant", "content": "edited"}, MORE], "unknown_history"),
        ([{"role": "user", "content": "a summary"}, {"role": "assistant", "content": TEXT}, MORE], "unknown_history"),
    ],
)
def test_a_history_that_nobody_sampled_is_sent_as_it_is_and_says_why(messages: list[dict], reason: str) -> None:
    served, ledger = prompts("chatml"), CallLedger()
    sampled = [*letters("chatml", TEXT), *end("chatml")]
    answered(ledger, served.prompt(request(ASKED), ledger), ASKED, sampled, {"role": "assistant", "content": TEXT})
    prompt = served.prompt(request(messages), ledger)
    assert prompt.reason == reason and prompt.token_ids == render("chatml", messages, True)


def test_a_history_that_the_template_renders_otherwise_is_refused_by_the_splice() -> None:
    """Other tools than before: the messages are the same, and what the model saw of them is not."""
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{%- if tools -%}{{ tools | tojson }}<|im_end|>{%- endif -%}" + tokenizer.chat_template
    served, ledger = Prompts(tokenizer, stop_token_ids=()), CallLedger()
    sampled = [*letters("chatml", TEXT), *end("chatml")]
    tools = [{"type": "function", "function": {"name": "add"}}]
    first = served.prompt(request(ASKED, tools=tools), ledger)
    call = answered(ledger, first, ASKED, sampled, {"role": "assistant", "content": TEXT})
    messages = [*ASKED, {"role": "assistant", "content": TEXT}, MORE]
    assert served.prompt(request(messages, tools=tools), ledger).kind == "drifted"
    other = served.prompt(request(messages, tools=[{"type": "function", "function": {"name": "sub"}}]), ledger)
    assert (other.kind, other.reason, other.parent) == ("as_sent", "environment_block_mismatch", call)


def test_a_template_that_refuses_the_messages_is_the_request_s_fault() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    refusal = "{%- if messages[0].role == 'tool' -%}{{ raise_exception('a tool cannot begin') }}{%- endif -%}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    served = Prompts(tokenizer, stop_token_ids=())
    with pytest.raises(ApiError, match=r"chat template refuses the messages: .*a tool cannot begin") as caught:
        served.prompt(request([{"role": "tool", "content": "7"}]), CallLedger())
    assert caught.value.status == 400


def test_tools_that_the_template_does_not_render_are_refused_or_said_to_be_left_out() -> None:
    add, sub = ({"type": "function", "function": {"name": name}} for name in ("add", "sub"))
    templates = {
        "{{ tools[0].function.name }}": None,
        "{{ tools and '' }}": "tools has 'add': .* does not render it",
        "{{ tools | tojson if messages[0].content == 'add' }}": "tools has 'add'",
    }
    for template, message in templates.items():
        tokenizer = copy.deepcopy(tokenizer_of("chatml"))
        tokenizer.chat_template = "{% if tools %}" + template + "{% endif %}" + STYLES["chatml"].template
        served = Prompts(tokenizer, stop_token_ids=())
        said = [{"role": "user", "content": "add or sub"}]  # names of tools, by chance
        if message is None:
            assert served.prompt(request(said, tools=[add]), CallLedger()).left_out == ()
            assert served.prompt(request([{"role": "user", "content": "x"}], tools=[add]), CallLedger()).left_out == ()
            with pytest.raises(ApiError, match="tools has 'sub'"):
                served.prompt(request([{"role": "user", "content": "x"}], tools=[add, sub]), CallLedger())
            continue
        with pytest.raises(ApiError, match=message) as caught:
            served.prompt(request(said, tools=[add]), CallLedger())
        assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")
        lenient = parse_chat({"messages": said, "tools": [add]}, SamplingSettings(), ignore=True)
        assert served.prompt(lenient, CallLedger()).left_out == ("tools",)


TOOL = {"name": "add", "description": "Adds 7", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer", "description": "the first"},
    "b": {"type": "integer", "enum": [7, 8]},
    "c": {"type": "array", "items": {"type": "object", "required": ["deep"], "properties": {
        "deep": {"type": "string", "const": "9", "description": "not everywhere"},
    }}},
}, "required": ["a"]}}  # fmt: skip
CALLING = {"role": "assistant", "content": "so", "tool_calls": [
    {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
]}  # fmt: skip
SAID = [
    {"role": "system", "content": "7 "},
    {"role": "user", "content": 'what is 7, "\u00e4" or\n8\n'},
    CALLING,
    {"role": "tool", "tool_call_id": "call00001", "content": "7"},
    {"role": "assistant", "content": "<think>hm</think>\n7", "reasoning_content": "hm"},
    {"role": "user", "content": "7"},
]
"""Every text but one stands in others too."""
CONTENT = "(message.content or '')"


def tokenizer_with(template: str, style: str = "chatml") -> Any:
    tokenizer = copy.deepcopy(tokenizer_of(style))
    tokenizer.chat_template = template
    return tokenizer


def served_by(template: str, style: str = "chatml") -> Prompts:
    return Prompts(tokenizer_with(template, style), stop_token_ids=())


def message_rows() -> list[tuple[str, list[dict], int, str]]:
    """Returns templates that leave something out, messages, the index of the one concerned, and its field."""
    turns, loop = STYLES["chatml"].template, "for message in messages -%}"
    said = [*SAID, {"role": "odd", "content": "7"}]
    rows = []
    for role, n in (("tool", 3), ("system", 0), ("user", 1), ("odd", 6)):
        skipping = turns.replace(loop, f"for message in messages if message.role != '{role}' -%}}", 1)
        rows.append((skipping, said, n, f"content of the role '{role}'"))
    merging = turns.replace(loop, "for message in messages if loop.index0 == 0 or message.role != 'system' -%}", 1)
    second = [SAID[0], SAID[1], {"role": "developer", "content": "8"}]
    rows.append(
        (merging.replace("loop.index0 == 0", "message == messages[0]"), second, 2, "content of the role 'system'")
    )
    cut = turns.replace(CONTENT, f"{CONTENT}[:40]")
    rows.append((cut, [{"role": "user", "content": "7" * 50}], 0, "content of the role 'user'"))
    neither = turns.replace("message.tool_calls or []", "[]").replace(
        CONTENT, f"{CONTENT}[9 * (message.tool_calls or []) | length :]"
    )
    rows.append((neither, SAID, 2, "tool_calls"))
    former = {"role": "assistant", "content": None, "function_call": {"name": "zap", "arguments": "{}"}}
    rows.append((turns, [former], 0, "function_call"))
    rows.append((turns, [*ASKED, CALLING | {"audio": {"id": "audio7"}}, SAID[3]], 1, "audio"))
    rows.append((turns, [ASKED[0] | {"name": "7"}], 0, "name"))
    rows.append((turns, swapped(), 2, "tool_call_id"))
    return rows


def swapped() -> list[dict]:
    """Two results in another order than their calls."""
    called = CALLING["tool_calls"][0]
    calls = [called, called | {"id": "call00002"}]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in reversed(calls)]
    return [*ASKED, CALLING | {"tool_calls": calls}, *results]


def all_but(condition: str) -> str:
    """Returns a template of a tool that leaves out keys of its parameters."""
    return (
        "{% macro shown(value, depth) %}{% if value is mapping %}{% for key, part in value.items() if not ("
        + condition
        + ") %}{{ key ~ ' ' ~ shown(part, depth + 1) }}{% endfor %}{% elif value is string or value is number %}"
        "{{ value ~ ' ' }}{% else %}{% for one in value %}{{ shown(one, depth) }}{% endfor %}{% endif %}{% endmacro %}"
        "{{ tool.function.name ~ tool.function.description ~ shown(tool.function.parameters, 0) }}"
    )


def tool_rows() -> list[tuple[str, str]]:
    """Returns templates that leave something of tools out, and the field."""
    function, parameters = "tools[0].function", "tools[0].function.parameters.properties"
    name = "{{ tool.function.name }}"
    told = name + "{{ tool.function.description }}"
    each = "{% for name, part in tool.function.parameters.properties.items() %}{{ name }}@{% endfor %}"
    rows = [
        ("", "tools has 'add'"),
        (name, f"{function}.description"),
        (told, f"{parameters}.a"),
        (told + each, f"{parameters}.a.description"),
        (told + each.replace("@", "{{ part.description }}"), f"{parameters}.b.enum"),
        (told + each.replace("@", "{{ part.description ~ part.enum }}"), f"{parameters}.c.items.properties.deep"),
        (all_but("key == 'type' and depth == 2"), f"{parameters}.a.type"),
        (all_but("key == 'type' and depth > 2"), f"{parameters}.c.items.type"),
        (all_but("key == 'required' and not depth"), "tools[0].function.parameters.required"),
        (all_but("key == 'required' and depth"), f"{parameters}.c.items.required"),
        (all_but("key == 'const'"), f"{parameters}.c.items.properties.deep.const"),
        (all_but("key == 'description' and depth > 2"), f"{parameters}.c.items.properties.deep.description"),
    ]
    rows = [("{% for tool in tools or [] %}" + row + "{% endfor %}", field) for row, field in rows]
    return [*rows, ("{{ tools[:1] | tojson if tools }}", "tools has 'ad'")]


def test_what_the_client_sent_and_the_template_leaves_out_is_refused_by_name_or_said_to_be_left_out() -> None:
    rows = [(template, said, [], f"messages[{n}].{field}") for template, said, n, field in message_rows()]
    turns, tools = STYLES["chatml"].template, [TOOL, TOOL | {"name": "ad"}]
    rows += [(told + turns, SAID, tools, field) for told, field in tool_rows()]
    for template, said, functions, field in rows:
        fields = {"tools": [{"type": "function", "function": function} for function in functions]}
        served, param = served_by(template), "tools" if functions else "messages"
        name = param if functions else re.sub(r"\[\d\]", "", field)
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                served.prompt(request(said, **fields), CallLedger())
            refused = caught.value
            assert refused.message.startswith(f"{field}: the model's chat template does not render it"), field
            assert (refused.status, refused.code, refused.param) == (400, "unsupported_parameter", param), field
            lenient = parse_chat({"messages": said, **fields}, SamplingSettings(), ignore=True)
            assert served.prompt(lenient, CallLedger()).left_out == (name,), field


def test_a_template_may_trim_escape_merge_and_strip_reasoning() -> None:
    turns = STYLES["chatml"].template
    first = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set messages = messages[1:] %}"
    )
    merging = turns.replace(CONTENT, f"({CONTENT} ~ (first if loop.last and first is defined else ''))")
    contents = (
        "message.content.split('</think>')[-1]",
        "message.content if not message.tool_calls else ''",
        "message.content | trim | tojson",
    )
    templates = [STYLES[style].template for style in STYLE_NAMES]
    templates += [first + "{% endif %}" + merging, *(turns.replace(CONTENT, f"({content})") for content in contents)]
    values = "part.enum | join(' | ') if part.enum else part['items'] | tojson if 'items' in part else part.type"
    typed = (
        "{% for tool in tools or [] %}// {{ tool.function.description | trim }} {{ tool.function.name }}(_:"
        "{% for name, part in tool.function.parameters.properties.items() %}// {{ part.description | trim }}"
        f"{{{{ name }}}}: {{{{ {values} }}}}{{% endfor %}}){{{{ tool.function.parameters.required }}}}{{% endfor %}}"
    )
    fields = {"tools": [{"type": "function", "function": TOOL}]}
    for template in templates:
        for told in ("{{ tools | tojson(indent=2) if tools }}", typed):
            served = served_by(told + template)
            for said in (SAID, SAID[:2], SAID[:4]):
                assert served.prompt(request(said, **fields), CallLedger()).left_out == (), told + template


def test_smollm2_s_template_shows_all_of_tools_and_is_its_own_one_without_them() -> None:
    template = (ROOT / "deploy" / "demo" / "smollm2.jinja").read_text()
    served = served_by(template)
    for said in (SAID, SAID[:2], SAID[1:4]):
        fields = {"tools": [{"type": "function", "function": TOOL}]}
        assert served.prompt(request(said, **fields), CallLedger()).left_out == ()
    own = (
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' \
        if messages[0].role != 'system' }}"
        + CHATML_TURNS
    )
    for said in (SAID[:2], SAID[1:2], [SAID[0], SAID[5], SAID[4], SAID[5]]):
        shown = [tokenizer_with(each).apply_chat_template(said, tokenize=False) for each in (template, own)]
        assert shown[0] == shown[1]


def test_what_is_rendered_once_costs_no_rendering_more(monkeypatch) -> None:
    served = served_by("{{ tools | tojson if tools }}" + STYLES["chatml"].template)
    fields = {"tools": [{"type": "function", "function": TOOL}]}
    num_rendered, text = 0, served._text

    def counted(*arguments):
        nonlocal num_rendered
        num_rendered += 1
        return text(*arguments)

    monkeypatch.setattr(served, "_text", counted)
    counts = []
    for _ in range(2):
        for said in (SAID[:2], SAID[:4], SAID):
            served.prompt(request(said, **fields), CallLedger())
        counts.append(num_rendered)
    assert counts[1] - counts[0] == 3


def test_variables_that_the_template_never_reads_are_refused_unrendered_or_said_to_be_left_out(monkeypatch) -> None:
    served = prompts("qwen3")
    for name in ("enable_thinkin", "thinking", "last", "message"):
        fields = {"chat_template_kwargs": {"enable_thinking": False, name: True}}
        with monkeypatch.context() as patched, pytest.raises(ApiError) as caught:
            patched.setattr(served, "_text", None)
            served.prompt(request(ASKED, **fields), CallLedger())
        expected = f"chat_template_kwargs.{name}: the model's chat template does not read it, .*: enable_thinking$"
        assert re.match(expected, caught.value.message) and caught.value.param == "chat_template_kwargs", name
        lenient = parse_chat({"messages": ASKED, **fields}, SamplingSettings(), ignore=True)
        prompt = served.prompt(lenient, CallLedger())
        assert prompt.left_out == (f"chat_template_kwargs.{name}",)
        assert decode("qwen3", prompt.token_ids).endswith("</think>\n\n")
    read = served.prompt(request(ASKED, chat_template_kwargs={"enable_thinking": False}), CallLedger())
    assert decode("qwen3", read.token_ids).endswith("</think>\n\n")


def test_a_text_that_no_tokens_could_make_short_enough_is_refused_unencoded(monkeypatch) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    served = Prompts(tokenizer, stop_token_ids=(), max_model_len=1000)
    longest = max(map(len, tokenizer.get_vocab()))
    assert len(served.prompt(request([{"role": "user", "content": "the " * 900}]), CallLedger()).token_ids) < 1000
    monkeypatch.setattr(served._encoder, "encode", None)
    for content in ("x" * 1000 * longest, "\N{SNOWMAN}" * 400 * longest):
        with pytest.raises(ApiError, match=r"context length is 1000 tokens.* in at least 1\d{3} tokens") as caught:
            served.prompt(request([{"role": "user", "content": content}]), CallLedger())
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_tools_of_any_depth_are_read_or_refused_unrendered_by_a_template_that_never_does(monkeypatch) -> None:
    served, fields = prompts("qwen3"), {"tools": [{"type": "function", "function": TOOL}]}
    untold = served_by(QWEN3_TURNS, "qwen3")
    assert served.prompt(request(ASKED, **fields), CallLedger()).left_out == ()
    deep: Any = {}
    for _ in range(450):
        deep = {"a": [deep]}
    deep_tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert served.prompt(request(ASKED, tools=[deep_tool]), CallLedger()).left_out == ()
    lenient = parse_chat({"messages": ASKED, **fields}, SamplingSettings(), ignore=True)
    assert untold.prompt(lenient, CallLedger()).left_out == ("tools",)
    monkeypatch.setattr(untold, "_text", None)
    with pytest.raises(ApiError, match="tools has 'add': the model's chat template does not render it"):
        untold.prompt(request(ASKED, **fields), CallLedger())


def test_results_in_another_order_than_their_calls_are_answered_if_the_template_shows_whose_they_are() -> None:
    shown = STYLES["chatml"].template.replace(CONTENT, f"(message.tool_call_id or '') + {CONTENT}")
    assert served_by(shown).prompt(request(swapped()), CallLedger()).left_out == ()
    assert prompts("chatml").prompt(request([*swapped()[:2], *swapped()[:1:-1]]), CallLedger()).left_out == ()


def test_an_error_of_the_tokenizer_is_not_the_template_s() -> None:
    broken = copy.deepcopy(tokenizer_of("chatml"))
    broken.chat_template += "{{ '\\ud800' }}"
    for tokenizer, whose in ((broken, "tokenizer cannot encode"), (tokenizer_with("{{ 1 // 0 }}"), "template refuses")):
        with pytest.raises(ConfigError, match=f"model.path: its .*{whose} a user's and an assistant's turn: [TZ]"):
            Prompts(tokenizer, stop_token_ids=())
    served = Prompts(tokenizer_of("chatml"), stop_token_ids=())
    with pytest.raises(ApiError, match="the model's tokenizer cannot encode the messages: TypeError"):
        served.prompt(request([{"role": "user", "content": "\ud800"}]), CallLedger())


class OneCall:
    """Finds a call of `add` in any answer."""

    skip_special_tokens = True

    def parse(self, text: str, token_ids: list[int], request: ChatRequest, prompt_ids: list[int]) -> ParsedAnswer:
        return ParsedAnswer(None, tool_calls=(("add", '{"a": 3, "b": 4}'),))


@pytest.mark.parametrize("version", ["v3", "v7", "v11", "v13"])
def test_mistrals_own_templates_take_an_answer_s_calls_back(version: str) -> None:
    """They refuse ids of calls in any form but their own."""
    from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    tokenizer = copy.deepcopy(tokenizer_of("mistral"))
    tokenizer.chat_template = generate_chat_template(
        spm=False,
        tokenizer_version=TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=False,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=False,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    completion = Completion(
        token_ids=pack_ids([*encode("mistral", TEXT), *end("mistral")]),
        behavior_logprobs=pack_floats([-1.0] * (len(encode("mistral", TEXT)) + 1)),
        version_spans=(VersionSpan(0, 0, len(encode("mistral", TEXT)) + 1),),
        finish_reason="stop",
    )
    message = Answers(tokenizer, OneCall()).message(request(ASKED, tools=tools), [1, 2], completion)
    (call,) = message.pop("tool_calls")
    said = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
    ids = Prompts(tokenizer, stop_token_ids=()).prompt(request(said, tools=tools), CallLedger()).token_ids
    assert call["id"] in decode("mistral", ids) or version == "v13"
    assert encode("mistral", "[TOOL_RESULTS]")[0] in ids
