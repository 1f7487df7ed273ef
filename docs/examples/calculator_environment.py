"""A taskset of the library verifiers: sums of three terms, with a calculator as a tool."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class CalculatorTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Computes an expression of integers, + - * and parentheses, for instance 2*(3+4)."""
        return compute(expression)


def compute(expression: str) -> str:
    if not re.fullmatch(r"[0-9+*() -]{1,100}", expression) or "**" in expression:
        raise ValueError("expected integers, + - * and parentheses")
    return str(eval(expression))


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        """1 if the last answer ends with the number."""
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class SumsConfig(vf.TasksetConfig):
    num_problems: int = 4096


class SumsTaskset(vf.Taskset[Sum, SumsConfig]):
    def load(self) -> Iterator[Sum]:
        draw = random.Random(1)
        for _ in range(self.config.num_problems):
            a, b, c = (str(draw.randrange(10, 100)) for _ in range(3))
            asked = a + draw.choice("+-*") + b + draw.choice("+-*") + c
            yield Sum(SumData(prompt=f"What is {asked}?", answer=compute(asked)))

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [CalculatorTools(vf.SharedToolsetConfig())]


__all__ = ["SumsTaskset"]

if __name__ == "__main__":
    CalculatorTools.run()
