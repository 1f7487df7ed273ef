"""Five chat templates in the style of known families, each with a small byte-level tokenizer trained on first use.

A tokenizer has enough merges that every word of `ANSWER` is one token, so that an answer can be sampled with other ids
than its text encodes to: `drifted` spells tokens byte by byte.
"""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ANSWER = "the answer is therefore seven because three plus four makes seven and the tool says so"
QUESTION = "what is three plus four"
CORPUS = [ANSWER, QUESTION, '{"name": "add", "arguments": {"a": 3, "b": 4}}', "user assistant system tool"]

TOOLS = "{%- if tools -%}{{ 'tools: ' + (tools | tojson) + '\\n' }}{%- endif -%}"
CHATML_TURNS = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)
   + '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

QWEN3_TURNS = """\
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > last.question and message.reasoning_content -%}
{{ '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
{{ (message.content or '').lstrip('\\n') }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)
   + '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{%- endif -%}
"""

MISTRAL_TURNS = """\
{{ '<s>' }}
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' -%}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' -%}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '[TOOL_CALLS]' + ([{'name': call.function.name, 'arguments': call.function.arguments}] | tojson) }}
{%- endfor -%}
{{ '</s>' }}
{%- endif -%}
{%- endfor -%}
"""

LLAMA3_TURNS = """\
{{ '<|begin_of_text|>' }}
{%- for message in messages -%}
{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}
{%- endfor -%}
{%- else -%}
{{ message.content | trim }}
{%- endif -%}
{{ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

GLM_TURNS = """\
{{ '[gMASK]<sop>' }}
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set keeps = loop.index0 > last.question and message.reasoning_content -%}
{{ '<|assistant|>\\n<think>' + (message.reasoning_content.strip() if keeps else '') + '</think>\\n' }}
{{- (message.content or '').strip() }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() -%}
{{ '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' + (value | tojson) + '</arg_value>' }}
{%- endfor -%}
{{ '\\n</tool_call>' }}
{%- endfor -%}
{%- elif message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{ '<|observation|>' }}{%- endif -%}
{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else -%}
{{ '<|' + message.role + '|>\\n' + message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def _json_call(key: str) -> Callable[[dict[str, Any]], str]:
    """Returns a function that writes a call as a model may: no spaces, and the arguments first."""
    return lambda arguments: json.dumps({key: arguments, "name": "add"}, separators=(",", ":"))


def _arg_tags(arguments: dict[str, Any]) -> str:
    return "add" + "".join(f"<arg_key>{k}</arg_key><arg_value> {v}</arg_value>" for k, v in arguments.items())


class Style(NamedTuple):
    """A family of chat templates.

    turn_end: the token that follows an assistant's answer, or None.
    user_turn, tool_turn: the rendering of such a turn after an answer's end, including the generation prompt.
    tool_call: a tool call with other whitespace than the template's, around `call`, its content.
    reasoning: the rendering of reasoning before an answer; empty if the template has none.
    """

    template: str
    specials: tuple[str, ...]
    words: tuple[str, ...]
    turn_end: str | None
    user_turn: str
    tool_turn: str
    tool_call: str
    call: Callable[[dict[str, Any]], str]
    reasoning: str = ""


_CHATML_USER = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_TOOL_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA3_END = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"

STYLES = {
    "qwen3": Style(
        QWEN3_TURNS,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        _TOOL_WORDS,
        "<|im_end|>",
        _CHATML_USER,
        _CHATML_USER.replace("{}", "<tool_response>\n{}\n</tool_response>"),
        "\n\n<tool_call>{}</tool_call>\n",
        _json_call("arguments"),
        "<think>\n{}\n</think>\n\n",
    ),
    "chatml": Style(
        CHATML_TURNS,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        _TOOL_WORDS,
        "<|im_end|>",
        _CHATML_USER,
        _CHATML_USER.replace("user", "tool"),
        " <tool_call>{}</tool_call>",
        _json_call("arguments"),
    ),
    "mistral": Style(
        MISTRAL_TURNS,
        (
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        (),
        "</s>",
        "[INST]{}[/INST]",
        "[TOOL_RESULTS]{}[/TOOL_RESULTS]",
        "[TOOL_CALLS] [{}]",
        _json_call("arguments"),
    ),
    "llama3": Style(
        LLAMA3_TURNS,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        (),
        "<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}" + _LLAMA3_END,
        "<|start_header_id|>ipython<|end_header_id|>\n\n{}" + _LLAMA3_END,
        "{}",
        _json_call("parameters"),
    ),
    "glm": Style(
        GLM_TURNS,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_TOOL_WORDS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        None,
        "<|user|>\n{}<|assistant|>",
        "<|observation|>\n<tool_response>\n{}\n</tool_response><|assistant|>",
        "<tool_call>{}</tool_call>\n",
        _arg_tags,
        "\n<think>{}</think>\n",
    ),
}


def _tokens(words: tuple[str, ...], special: bool) -> list[AddedToken]:
    return [AddedToken(word, special=special, normalized=False) for word in words]


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    style = STYLES[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(_tokens(style.specials, True))
    tokenizer.add_tokens(_tokens(style.words, False))
    # As the families do: only the end of a turn (or of a text) has a name in the tokenizer.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=style.turn_end or "<|endoftext|>", chat_template=TOOLS + style.template
    )


def encode(name: str, text: str) -> list[int]:
    """Returns the canonical ids of a text."""
    return tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]


def decode(name: str, token_ids: list[int]) -> str:
    return tokenizer_of(name).decode(token_ids, clean_up_tokenization_spaces=False)


def render_text(name: str, messages: list[dict[str, Any]], add_generation_prompt: bool, **arguments: Any) -> str:
    return tokenizer_of(name).apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=False, **arguments
    )


def render(name: str, messages: list[dict[str, Any]], add_generation_prompt: bool, **arguments: Any) -> list[int]:
    return encode(name, render_text(name, messages, add_generation_prompt, **arguments))


def drifted(name: str, text: str, every: int = 1) -> list[int]:
    """Returns the ids of a text with every nth of its tokens spelled byte by byte: the same text, other ids."""
    tokenizer = tokenizer_of(name)
    added = set(tokenizer.get_added_vocab().values())
    ids: list[int] = []
    for n, token_id in enumerate(encode(name, text)):
        if n % every or token_id in added:
            ids.append(token_id)
        else:
            ids += (tokenizer.convert_tokens_to_ids(byte) for byte in tokenizer.convert_ids_to_tokens(token_id))
    return ids
