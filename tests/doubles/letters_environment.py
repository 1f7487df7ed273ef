"""An environment for the model and the tokenizer of probed_engine.py."""

import random

from penstock.schemas.prompt import Prompt


class Letters:
    """Prompts of a few letters; the reward is the share of `a` in the answer."""

    num_evaluation_prompts = 2

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        letters = random.Random(f"{self._seed} {index}").choices("abcdefg", k=7)
        return Prompt(text="".join(letters))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self.prompt(-n)

    def reward(self, prompt: Prompt, completion: str) -> float:
        return completion.count("a") / max(1, len(completion))
