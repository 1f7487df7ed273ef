"""The demo's task behind a prefix that all prompts share, long enough for a block of the engine's cache."""

import msgspec

from producers.environments.arithmetic import Arithmetic
from schemas.prompt import Prompt

BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes."""


class PrefixedArithmetic(Arithmetic):
    """`Arithmetic`, every prompt behind `num_prefix_tokens` of `prefix_token`: what a system prompt is elsewhere.

    The demo's model has seen no such prefix; of the texts tried, its padding token disturbs it least.
    """

    def __init__(
        self,
        *,
        seed: int,
        width: int = 2,
        num_evaluation_prompts: int = 256,
        prefix_token: str = "<pad>",
        num_prefix_tokens: int = BLOCK_TOKENS,
    ) -> None:
        super().__init__(seed=seed, width=width, num_evaluation_prompts=num_evaluation_prompts)
        if num_prefix_tokens < 1:
            raise ValueError(f"PrefixedArithmetic: num_prefix_tokens is {num_prefix_tokens}, expected 1 or more")
        self._prefix = prefix_token * num_prefix_tokens

    def prompt(self, index: int) -> Prompt:
        return self._prefixed(super().prompt(index))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._prefixed(super().evaluation_prompt(n))

    def _prefixed(self, prompt: Prompt) -> Prompt:
        assert prompt.text is not None
        return msgspec.structs.replace(prompt, text=self._prefix + prompt.text)
