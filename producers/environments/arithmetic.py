"""Addition of two numbers, scored exactly: a task that a small model learns in minutes."""

import hashlib
import itertools

from penstock.schemas.prompt import Prompt, Reward

HELD_OUT_ONE_IN = 8
"""One of this many pairs of operands is held out."""
MAX_WIDTH = 18


class Arithmetic:
    """`07+34=` is answered `041`: two operands of `width` digits and a sum of one digit more, padded with zeros.

    A hash of the pair of operands alone decides whether it is held out, the same for `12+34` and `34+12`. A warm start
    and a run with different seeds therefore agree on what was never trained on, and runs with different seeds are
    evaluated on the same problems.

    The reward is 1 for the exact sum. Anything else earns `partial_credit * matches / length`: matches counts the
    digits that agree when both strings are aligned at the right, length is that of the longer one.
    """

    def __init__(
        self, *, seed: int, width: int = 2, num_evaluation_prompts: int = 256, partial_credit: float = 0.0
    ) -> None:
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"Arithmetic: width is {width}, expected 1 to {MAX_WIDTH}")
        if not 0.0 <= partial_credit < 1.0:
            raise ValueError(f"Arithmetic: partial_credit is {partial_credit}, expected 0 <= partial_credit < 1")
        if num_evaluation_prompts < 0:
            raise ValueError(f"Arithmetic: num_evaluation_prompts is {num_evaluation_prompts}, expected 0 or more")
        self.num_evaluation_prompts = num_evaluation_prompts
        self._seed = seed
        self._partial_credit = partial_credit
        self._width = width
        self._evaluation = self._held_out_problems(num_evaluation_prompts)
        if len(self._evaluation) < num_evaluation_prompts:
            raise ValueError(
                f"Arithmetic: num_evaluation_prompts is {num_evaluation_prompts}, expected at most "
                f"{len(self._evaluation)}: width {width} holds out no more problems"
            )

    def prompt(self, index: int) -> Prompt:
        draws = (self._operands("training", self._seed, index, attempt) for attempt in itertools.count())
        a, b = next((a, b) for a, b in draws if not _is_held_out(a, b))
        return self._prompt(a, b)

    def evaluation_prompt(self, n: int) -> Prompt:
        if not 1 <= n <= self.num_evaluation_prompts:
            raise ValueError(f"Arithmetic: held-out problem {n} asked for, expected 1 to {self.num_evaluation_prompts}")
        return self._prompt(*self._evaluation[n - 1])

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        guess, answer = completion.strip(), prompt.answer
        exact = guess == answer
        matches = sum(x == y for x, y in zip(reversed(guess), reversed(answer), strict=False))
        digits = matches / max(len(guess), len(answer))
        value = 1.0 if exact else self._partial_credit * digits
        return Reward(value=value, parts={"exact": float(exact), "digits": digits})

    def _held_out_problems(self, wanted: int) -> list[tuple[int, int]]:
        problems: dict[tuple[int, int], None] = {}
        # One draw in HELD_OUT_ONE_IN is held out; if far more draws are needed, there are no more problems.
        for attempt in range(wanted * HELD_OUT_ONE_IN * 16):
            if len(problems) == wanted:
                break
            a, b = self._operands("evaluation", attempt)
            if _is_held_out(a, b):
                problems[a, b] = None
        return list(problems)

    def _operands(self, *key: str | int) -> tuple[int, int]:
        quotient, remainder = divmod(_digest(*key), 10**self._width)
        return remainder, quotient % 10**self._width

    def _prompt(self, a: int, b: int) -> Prompt:
        return Prompt(text=f"{a:0{self._width}}+{b:0{self._width}}=", answer=f"{a + b:0{self._width + 1}}")


def _is_held_out(a: int, b: int) -> bool:
    return _digest("held out", min(a, b), max(a, b)) % HELD_OUT_ONE_IN == 0


def _digest(*key: str | int) -> int:
    """Returns a number below 2**128 that depends on the key alone, on every machine and in every Python."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "big")
