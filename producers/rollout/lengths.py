"""Length rewards, for a component next to the task's own. |y| is `facts.num_tokens`."""

from collections.abc import Sequence

from penstock.producers.interfaces import RolloutFacts
from penstock.schemas.prompt import Prompt


def soft_overlong(prompt: Prompt, completion: str, *, facts: RolloutFacts, cache_tokens: int) -> float:
    """Soft overlong punishment: 0 to -1 over the last `cache_tokens` before the limit (L_cache; L_max is
    `facts.max_tokens`)::

        0                                      |y| <= L_max - L_cache
        (L_max - L_cache - |y|) / L_cache      up to L_max
        -1                                     beyond

    Source: DAPO (arXiv 2503.14476, equation 13), with L_max = 20,480 and L_cache = 4,096. Departure: where a prompt
    leaves less of the model's context than sampling.max_tokens, L_max is what it leaves.

    Raises:
        ValueError: cache_tokens is not from 1 to L_max.
    """
    if not 1 <= cache_tokens <= facts.max_tokens:
        raise ValueError(
            f"cache_tokens = {cache_tokens}, expected 1 or more and at most the limit of {facts.max_tokens}"
        )
    return max(-1.0, min(0.0, (facts.max_tokens - cache_tokens - facts.num_tokens) / cache_tokens))


def target_length(prompt: Prompt, completion: str, *, facts: RolloutFacts, num_tokens: int) -> float:
    """The distance from a wanted length, -abs(num_tokens - |y|).

    Source: L1-Exact (arXiv 2503.04697, equation 1), whose alpha is the component's weight.
    """
    return -float(abs(num_tokens - facts.num_tokens))


def relative_length(prompt: Prompt, completions: Sequence[str], *, facts: Sequence[RolloutFacts]) -> list[float]:
    """Against the siblings' lengths: 0 for the shorter half of their range, down to -0.5 for the longest::

        min(0, 0.5 - (|y| - min) / (max - min)), and 0 if all are equally long

    Source: Kimi k1.5 (arXiv 2501.12599, section 2.3.3), its length reward for wrong answers. Departure: it also applies
    to correct ones, which have no min(0, .) there: a component does not know which answers are correct.
    """
    lengths = [each.num_tokens for each in facts]
    shortest, span = min(lengths), max(lengths) - min(lengths)
    return [min(0.0, 0.5 - (length - shortest) / span) if span else 0.0 for length in lengths]
