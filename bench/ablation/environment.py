"""The demo's task behind a prefix that all prompts share, long enough for a block of the engine's cache."""

import msgspec

from penstock.producers.environments.arithmetic import Arithmetic
from penstock.schemas.prompt import Prompt

BLOCK_TOKENS = 32
"""The smallest block that vLLM's CPU attention takes."""


class PrefixedArithmetic(Arithmetic):
    """`Arithmetic` with every prompt behind `prefix`, as behind a system prompt.

    The demo's model has seen no such prefix, and most disturb it so much that no answer is right at first. Its padding
    token would not: that one's embedding is zero, and so are its keys and values, whatever the weights.
    """

    def __init__(
        self,
        *,
        seed: int,
        width: int = 2,
        num_evaluation_prompts: int = 256,
        prefix: str = "What is the sum of these numbers",
    ) -> None:
        super().__init__(seed=seed, width=width, num_evaluation_prompts=num_evaluation_prompts)
        self._prefix = prefix

    def prompt(self, index: int) -> Prompt:
        return self._prefixed(super().prompt(index))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._prefixed(super().evaluation_prompt(n))

    def _prefixed(self, prompt: Prompt) -> Prompt:
        assert prompt.text is not None
        return msgspec.structs.replace(prompt, text=self._prefix + prompt.text)
