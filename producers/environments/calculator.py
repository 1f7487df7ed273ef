"""Arithmetic with a calculator at hand: a task of several turns, too hard for a small model's head."""

import json
import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from schemas.prompt import Message, Prompt, Reward

if TYPE_CHECKING:
    from producers.endpoint.inside import Conversation

Json = dict[str, Any]

OPERATORS = "+-*"
HELD_OUT_ONE_IN = 8
"""One expression in so many is held out."""
MAX_EXPRESSION = 100
"""Characters that the calculator reads. Without powers a result has about as many digits at most."""
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes an expression of integers, + - * and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "for instance 2*(3+4)"}},
                "required": ["expression"],
            },
        },
    }
]
_TOKEN = re.compile(r"[0-9]+|[-+*()]")
_NUMBER = re.compile(r"(?:(?<![0-9])-)?[0-9]+")


class Calculator:
    """`What is 47*83-26?` is answered `3875`, after as many calls of the tool as `max_turns` leaves room for.

    An expression has `num_operands` numbers of `width` digits. Whether one is held out depends on itself alone, so that
    a warm start and runs with other seeds agree on what was never trained on.

    The reward is 1 where the last number of the last answer is the right one, else 0. Its part `called` is 1 where the
    calculator has computed something, 0 otherwise.
    """

    def __init__(
        self,
        *,
        seed: int,
        width: int = 2,
        num_operands: int = 3,
        num_evaluation_prompts: int = 64,
        max_turns: int = 4,
    ) -> None:
        settings = {"width": (width, 1, 9), "num_operands": (num_operands, 2, 8), "max_turns": (max_turns, 1, 64)}
        settings["num_evaluation_prompts"] = (num_evaluation_prompts, 0, 4096)
        for name, (value, least, most) in settings.items():
            if not least <= value <= most:
                raise ValueError(f"Calculator: {name} is {value}, expected {least} to {most}")
        self.num_evaluation_prompts = num_evaluation_prompts
        self._seed = seed
        self._width = width
        self._num_operands = num_operands
        self._max_turns = max_turns
        held_out = self._expressions("evaluation", held_out=True)
        self._evaluation = [next(held_out) for _ in range(num_evaluation_prompts)]

    def prompt(self, index: int) -> Prompt:
        return _ask(next(self._expressions(f"training:{self._seed}:{index}", held_out=False)))

    def evaluation_prompt(self, n: int) -> Prompt:
        if not 1 <= n <= self.num_evaluation_prompts:
            raise ValueError(f"Calculator: held-out problem {n} asked for, expected 1 to {self.num_evaluation_prompts}")
        return _ask(self._evaluation[n - 1])

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Of an answer given at once, without the tool."""
        return _reward(prompt, completion, called=False)

    async def converse(self, prompt: Prompt, conversation: "Conversation") -> Reward:
        messages: list[Json] = [{"role": message.role, "content": message.content} for message in prompt.messages or ()]
        called = False
        for _ in range(self._max_turns):
            reply = await conversation.chat(messages, tools=TOOLS)
            if not reply.get("tool_calls"):
                return _reward(prompt, reply["content"] or "", called)
            messages.append(reply)
            for call in reply["tool_calls"]:
                result = run_tool(call["function"]["name"], call["function"]["arguments"])
                called = called or not result.startswith("error")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return _reward(prompt, "", called)

    def _expressions(self, key: str, *, held_out: bool) -> Iterator[str]:
        """Without end, the same for one key, on one side of the split."""
        draw = random.Random(key)
        smallest, beyond = 10 ** (self._width - 1), 10**self._width
        while True:
            numbers = [str(draw.randrange(smallest, beyond)) for _ in range(self._num_operands)]
            expression = numbers[0] + "".join(draw.choice(OPERATORS) + number for number in numbers[1:])
            if (random.Random(expression).randrange(HELD_OUT_ONE_IN) == 0) is held_out:
                yield expression


def run_tool(name: str, arguments: str) -> str:
    """What the tool says to a call: the result, or what is wrong with the call, for the model to try again."""
    if name != "calculator":
        return f"error: no tool {name[:40]!a}, expected calculator"
    try:
        return str(evaluate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = error if type(error) is ValueError else 'expected {"expression": "2*(3+4)"}'
        return f"error: {found}"


def evaluate(expression: str) -> int:
    """The value of an expression of integers, + - * and parentheses.

    Raises:
        ValueError: it is longer than `MAX_EXPRESSION`, or anything else.
        TypeError: it is no text.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"{len(expression)} characters, expected at most {MAX_EXPRESSION}")
    tokens = _TOKEN.findall(expression)
    if "".join(tokens) != re.sub(r"\s", "", expression):
        raise ValueError("expected integers, + - * and parentheses")
    tokens.append("the end")
    value = _sum(tokens)
    _take(tokens, "the end")
    return value


def _sum(tokens: list[str]) -> int:
    value = _product(tokens)
    while tokens[0] in "+-":
        value += _product(tokens) if tokens.pop(0) == "+" else -_product(tokens)
    return value


def _product(tokens: list[str]) -> int:
    value = _factor(tokens)
    while tokens[0] == "*":
        tokens.pop(0)
        value *= _factor(tokens)
    return value


def _factor(tokens: list[str]) -> int:
    token = tokens.pop(0)
    if token in "+-":
        return _factor(tokens) if token == "+" else -_factor(tokens)
    if token == "(":
        value = _sum(tokens)
        _take(tokens, ")")
        return value
    if not token.isdecimal():
        raise ValueError(f"expected a number, found {token}")
    return int(token)


def _take(tokens: list[str], expected: str) -> None:
    token = tokens.pop(0)
    if token != expected:
        raise ValueError(f"expected {expected}, found {token}")


def _ask(expression: str) -> Prompt:
    question = Message(role="user", content=f"What is {expression}?")
    return Prompt(messages=(question,), answer=str(evaluate(expression)), metadata={"expression": expression})


def _reward(prompt: Prompt, answer: str, called: bool) -> Reward:
    numbers = _NUMBER.findall(answer.replace(",", ""))
    exact = float(bool(numbers) and numbers[-1] == prompt.answer)
    return Reward(value=exact, parts={"exact": exact, "called": float(called)})
