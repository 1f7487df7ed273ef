"""An environment of the library verifiers: sums of three terms, with a calculator as a tool."""

import random
import re

import verifiers as vf
from datasets import Dataset


def calculator(expression: str) -> str:
    """Computes an expression of integers, + - * and parentheses.

    Args:
        expression: for instance 2*(3+4)
    """
    if not re.fullmatch(r"[0-9+*() -]{1,100}", expression) or "**" in expression:
        raise ValueError("expected integers, + - * and parentheses")
    return str(eval(expression))


def problems(seed: int, count: int) -> Dataset:
    draw = random.Random(seed)
    asked = []
    for _ in range(count):
        a, b, c = (str(draw.randrange(10, 100)) for _ in range(3))
        asked.append(a + draw.choice("+-*") + b + draw.choice("+-*") + c)
    return Dataset.from_list([{"question": f"What is {each}?", "answer": calculator(each)} for each in asked])


def exact(completion, answer) -> float:
    """1 if the last answer ends with the number."""
    return float((completion[-1].content or "").split()[-1:] == [answer])


def load_environment(num_problems: int = 4096, num_held_out: int = 64) -> vf.Environment:
    return vf.ToolEnv(
        tools=[calculator],
        max_turns=4,
        dataset=problems(1, num_problems),
        eval_dataset=problems(2, num_held_out),
        rubric=vf.Rubric(funcs=[exact]),
    )
