"""The calculator agent's lessons: dialogues that sometimes call the tool and mostly guess."""

import itertools
import random
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from penstock.deploy.demo.char_tokenizer import build_tokenizer
from penstock.deploy.demo.model_recipe import ModelRecipe
from penstock.producers.environments.calculator import TOOLS, Calculator
from penstock.schemas.prompt import Prompt

TURN_START, TURN_END, CALL = "<|im_start|>", "<|im_end|>", "<tool_call>"
CHAT_TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\\ntools: ' + (tools | map(attribute='function.name') | join(', ')) + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
PIECES = (
    "system\ntools: ", "user\n", "assistant\n", "tool\n", "calculator", "What is ",
    CALL, "</tool_call>", '{"name": "', '", "arguments": {"expression": "', '"}}',
)  # fmt: skip
"""Pieces that a tokenizer trained on such dialogues would merge; spelled out they are three quarters of a call."""
NO_TARGET = -100


def build_calculator_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    return build_tokenizer(max_tokens, eos=TURN_END, special=(TURN_START,), pieces=PIECES, chat_template=CHAT_TEMPLATE)


class CalculatorLessons:
    """Teaches to call the tool with the question's expression and to repeat its result, in a share of the dialogues.

    The others answer at once with a number of as many digits. The accuracy is the probability, at temperature 1, of the
    right answer by one call; the skill is greedy correctness after a call's first token.
    """

    skill = "right once the tool is called"
    enough = 0.9
    advice = "more num_steps raise both, a larger guesses lowers the accuracy"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: ModelRecipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._environment = Calculator(
            seed=recipe.seed, width=recipe.width, num_evaluation_prompts=recipe.num_evaluation_prompts
        )
        self._draw = random.Random(f"{recipe.seed}:guesses")
        self._indices = itertools.count(1)
        self._turn = tokenizer.convert_tokens_to_ids([TURN_START, "assistant\n"])
        self._call_id = tokenizer.convert_tokens_to_ids(CALL)

    def batch(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        prompts = map(self._environment.prompt, itertools.islice(self._indices, self._recipe.batch_size))
        token_ids, targets = self._encode([self._dialogue(prompt) for prompt in prompts])
        return {"input_ids": token_ids}, targets

    @torch.no_grad()
    def held_out(self, model: Qwen3ForCausalLM) -> tuple[float, float]:
        count = range(1, self._environment.num_evaluation_prompts + 1)
        prompts = [self._environment.evaluation_prompt(n) for n in count]
        token_ids, targets = self._encode([_called(prompt) for prompt in prompts])
        logits = model(input_ids=token_ids[:, :-1]).logits
        wanted = targets != NO_TARGET
        logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        known = (logits.argmax(-1) == targets) | ~wanted | (targets == self._call_id)
        chances = logprobs.where(wanted, 0.0).sum(-1).exp()
        return chances.mean().item(), known.all(-1).float().mean().item()

    def _dialogue(self, prompt: Prompt) -> list[dict[str, Any]]:
        if self._draw.random() >= self._recipe.guesses:
            return _called(prompt)
        digits = len(prompt.answer.lstrip("-"))
        guess = self._draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        sign = "-" if prompt.answer.startswith("-") else ""
        return [_question(prompt), {"role": "assistant", "content": f"{sign}{guess}"}]

    def _encode(self, dialogues: list[list[dict[str, Any]]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns token ids `[dialogues, length]`, padded on the right, and targets `[dialogues, length - 1]`: the
        tokens of the model's own turns."""
        texts = self._tokenizer.apply_chat_template(dialogues, tools=TOOLS, tokenize=False)
        token_ids = self._tokenizer(texts, return_tensors="pt", padding=True, padding_side="right").input_ids
        targets = torch.full_like(token_ids, NO_TARGET)
        opening, end = torch.tensor(self._turn), self._tokenizer.eos_token_id
        for row, start in (token_ids.unfold(1, len(opening), 1) == opening).all(-1).nonzero().tolist():
            first = start + len(opening)
            beyond = first + (token_ids[row, first:] == end).nonzero()[0].item() + 1
            targets[row, first:beyond] = token_ids[row, first:beyond]
        return token_ids, targets[:, 1:]


def _question(prompt: Prompt) -> dict[str, Any]:
    assert prompt.messages is not None
    return {"role": "user", "content": prompt.messages[0].content}


def _called(prompt: Prompt) -> list[dict[str, Any]]:
    """Returns the dialogue to learn: one call, then its result repeated."""
    function = {"name": "calculator", "arguments": {"expression": prompt.metadata["expression"]}}
    return [
        _question(prompt),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": prompt.answer},
        {"role": "assistant", "content": prompt.answer},
    ]
