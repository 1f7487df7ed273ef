"""The demo's lessons: sums in which carries are often forgotten."""

import itertools
import random

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from penstock.deploy.demo.char_tokenizer import EOS
from penstock.deploy.demo.model_recipe import ModelRecipe
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.prompt import Prompt


class AdditionLessons:
    """Teaches the digits of a sum, mostly without carries. The accuracy is the greedy exact match."""

    skill = "right but for carries"
    enough = 0.97
    advice = "more num_steps raise both, a larger forgotten_carries lowers the accuracy"

    def __init__(self, tokenizer: PreTrainedTokenizerFast, recipe: ModelRecipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._environment = Arithmetic(
            seed=recipe.seed, width=recipe.width, num_evaluation_prompts=recipe.num_evaluation_prompts
        )
        self._forgetting = random.Random(f"{recipe.seed}:forgotten carries")
        self._indices = itertools.count(1)

    def batch(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        indices = itertools.islice(self._indices, self._recipe.batch_size)
        share = self._recipe.forgotten_carries
        texts = [_example(self._environment.prompt(index), share, self._forgetting) for index in indices]
        token_ids = self._tokenizer(texts, return_tensors="pt").input_ids
        return {"input_ids": token_ids}, token_ids[:, -(self._recipe.width + 2) :]

    @torch.no_grad()
    def held_out(self, model: Qwen3ForCausalLM) -> tuple[float, float]:
        """Returns the shares of held-out problems answered exactly, and rightly but for forgotten carries, greedily."""
        environment = self._environment
        prompts = [environment.evaluation_prompt(n) for n in range(1, environment.num_evaluation_prompts + 1)]
        token_ids = self._tokenizer([prompt.text for prompt in prompts], return_tensors="pt").input_ids
        prompt_length = token_ids.shape[1]
        for _ in range(len(prompts[0].answer) + 1):
            likeliest = model(input_ids=token_ids, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
            token_ids = torch.cat([token_ids, likeliest], dim=1)
        answers = [text.partition(EOS)[0] for text in self._tokenizer.batch_decode(token_ids[:, prompt_length:])]
        num_exact = sum(answer == prompt.answer for answer, prompt in zip(answers, prompts, strict=True))
        num_known = sum(
            answer in _sums_but_for_carries(prompt) for answer, prompt in zip(answers, prompts, strict=True)
        )
        return num_exact / len(prompts), num_known / len(prompts)


def _example(prompt: Prompt, share: float, forgetting: random.Random) -> str:
    """Returns a problem and its sum, each carry forgotten with probability `share`, as in `47+85=122`."""
    digits, carry = "", 0
    for x, y in _columns(prompt):
        column = x + y + carry
        digits = str(column % 10) + digits
        carry = int(column >= 10 and forgetting.random() >= share)
    return f"{prompt.text}{carry}{digits}{EOS}"


def _sums_but_for_carries(prompt: Prompt) -> set[str]:
    """Returns every answer that some choice of forgotten carries gives, including the right one."""
    unfinished = {("", 0)}
    for x, y in _columns(prompt):
        sums = {(str((x + y + carry) % 10) + digits, x + y + carry) for digits, carry in unfinished}
        unfinished = {(digits, carry) for digits, column in sums for carry in {0, column // 10}}
    return {str(carry) + digits for digits, carry in unfinished}


def _columns(prompt: Prompt) -> list[tuple[int, int]]:
    assert prompt.text is not None
    a, b = prompt.text.removesuffix("=").split("+")
    return [(int(x), int(y)) for x, y in zip(reversed(a), reversed(b), strict=True)]
