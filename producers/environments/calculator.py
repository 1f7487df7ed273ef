"""Arithmetic with a calculator: a task of several turns, too hard for a small model without the tool."""

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Message, Prompt, Reward

Json = dict[str, Any]

OPERATORS = "+-*"
HELD_OUT_ONE_IN = 8
"""One of this many expressions is held out."""
MAX_EXPRESSION = 100
"""Characters of the longest expression. Without powers, a result has at most about as many digits."""
TOOLS: list[Any] = [
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
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
EXPECTED = "expected integers, + - * and parentheses"
_CHARACTERS = re.compile(r"[-0-9+*()\s]*", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<![0-9])0+(?=[0-9])")
_NUMBER = re.compile(r"(?:(?<![0-9])-)?[0-9]+")


class CalculatorTasks:
    """`What is 47*83-26?` is answered `3875`. For agents outside the producer, which bring their own calculator.

    An expression has `num_operands` numbers of `width` digits. Whether it is held out depends on itself alone, so that
    a warm start and runs with other seeds agree on what was never trained on.

    The reward is 1 if the last number of an answer is correct, else 0.
    """

    def __init__(self, *, seed: int, width: int = 2, num_operands: int = 3, num_evaluation_prompts: int = 64) -> None:
        _check("width", width, 1, 9)
        _check("num_operands", num_operands, 2, 8)
        _check("num_evaluation_prompts", num_evaluation_prompts, 0, 4096)
        self.num_evaluation_prompts = num_evaluation_prompts
        self._seed = seed
        self._width = width
        self._num_operands = num_operands
        held_out = self._expressions("evaluation", held_out=True)
        self._evaluation = [next(held_out) for _ in range(num_evaluation_prompts)]

    def prompt(self, index: int) -> Prompt:
        return _ask(next(self._expressions(f"training:{self._seed}:{index}", held_out=False)))

    def evaluation_prompt(self, n: int) -> Prompt:
        if not 1 <= n <= self.num_evaluation_prompts:
            raise ValueError(f"Calculator: held-out problem {n} asked for, expected 1 to {self.num_evaluation_prompts}")
        return _ask(self._evaluation[n - 1])

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        numbers = _NUMBER.findall(completion.replace(",", ""))
        exact = float(bool(numbers) and numbers[-1] == prompt.answer)
        return Reward(value=exact, parts={"exact": exact})

    def _expressions(self, key: str, *, held_out: bool) -> Iterator[str]:
        """Yields expressions of one side of the split without end, the same for the same key."""
        draw = random.Random(key)
        smallest, beyond = 10 ** (self._width - 1), 10**self._width
        while True:
            numbers = [str(draw.randrange(smallest, beyond)) for _ in range(self._num_operands)]
            expression = numbers[0] + "".join(draw.choice(OPERATORS) + number for number in numbers[1:])
            if (random.Random(expression).randrange(HELD_OUT_ONE_IN) == 0) is held_out:
                yield expression


class Calculator(CalculatorTasks):
    """The same tasks in a conversation of at most `max_turns` answers, with the calculator as a tool.

    The reward is the last answer's; its part `called` is 1 if the calculator has computed something, else 0.
    """

    def __init__(self, *, max_turns: int = 4, **tasks: Any) -> None:
        super().__init__(**tasks)
        _check("max_turns", max_turns, 1, 64)
        self._max_turns = max_turns

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        messages: list[Json] = [message.openai for message in prompt.messages or ()]
        called = False
        for _ in range(self._max_turns):
            reply = await conversation.chat(messages, tools=TOOLS)
            if not reply.get("tool_calls"):
                return self._score(prompt, reply["content"] or "", called)
            messages.append(reply)
            for call in reply["tool_calls"]:
                result = run_tool(call["function"]["name"], call["function"]["arguments"])
                called = called or not result.startswith("error")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return self._score(prompt, "", called)

    def _score(self, prompt: Prompt, answer: str, called: bool) -> Reward:
        reward = self.reward(prompt, answer)
        return Reward(value=reward.value, parts=reward.parts | {"called": float(called)})


def run_tool(name: str, arguments: str) -> str:
    """Returns the result of a tool call, or what is wrong with the call, so that the model can try again."""
    if name != "calculator":
        return f"error: no tool {name[:40]!a}, expected calculator"
    try:
        return str(evaluate(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = error if type(error) is ValueError else 'expected {"expression": "2*(3+4)"}'
        return f"error: {found}"


def evaluate(expression: str) -> int:
    """Returns the value of an expression of integers, + - * and parentheses.

    Raises:
        ValueError: it is longer than `MAX_EXPRESSION`, or not such an expression.
        TypeError: it is not a string.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"{len(expression)} characters, expected at most {MAX_EXPRESSION}")
    if not _CHARACTERS.fullmatch(expression):
        raise ValueError(EXPECTED)
    try:
        # Python refuses leading zeros and lines of their own.
        return _value(ast.parse(_LEADING_ZEROS.sub("", " ".join(expression.split())), mode="eval").body)
    except SyntaxError:
        raise ValueError(EXPECTED) from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError(EXPECTED)


def _ask(expression: str) -> Prompt:
    question = Message(role="user", content=f"What is {expression}?")
    return Prompt(messages=(question,), answer=str(evaluate(expression)), metadata={"expression": expression})


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"Calculator: {name} is {value}, expected {least} to {most}")
