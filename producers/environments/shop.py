"""A shop with two tools: the price of an item, which nobody knows without asking, and multiplication."""

import json
import random
import re
from typing import Any

from penstock.producers.interfaces import Conversation
from penstock.schemas.prompt import Message, Prompt, Reward

Json = dict[str, Any]

ITEMS = """
apple bag ball basket bed bell belt bench bike blanket boat book boot bottle bowl box brush bucket button cake
camera candle cap card carpet chair clock coat comb cup curtain desk doll door drum fan flute fork glass glove
guitar hammer hat jar kettle key kite ladder lamp map mirror mug nail needle pan pen pencil phone piano pillow
plate pot radio ring rope ruler saw shirt shoe shovel sock spoon stool table tent towel toy umbrella vase wheel
""".split()  # noqa: SIM905
HELD_OUT_ONE_IN = 4
"""One of this many items is held out."""
FEWEST, MOST = 2, 9
CHEAPEST, DEAREST = 11, 59
"""Dollars."""
_NUMBER = re.compile(r"-?[0-9]+")


def _tool(name: str, description: str, **parameters: str) -> Json:
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("price", "Dollars for one", item="string"),
    _tool("multiply", "Returns a times b", a="integer", b="integer"),
]


class Shop:
    """`How many dollars do 4 lamps cost?` is answered after `price(item="lamp")` and `multiply(a=4, b=23)`.

    A price is drawn for each task, so that no policy can know it without the tool. Held-out tasks ask for items that
    training has never named. One solved task stands before each question.

    The reward is 1 if the last number of the last answer is correct, 0.5 if only `multiply` has returned it, else 0.
    Its parts `correct`, `multiplied` and `asked` are 1 for the first, the second, and a price that was returned.
    """

    def __init__(self, *, seed: int, num_evaluation_prompts: int = 64, max_turns: int = 4) -> None:
        for name, value, least, most in (
            ("num_evaluation_prompts", num_evaluation_prompts, 0, 4096),
            ("max_turns", max_turns, 1, 64),
        ):
            if not least <= value <= most:
                raise ValueError(f"Shop: {name} is {value}, expected {least} to {most}")
        self.num_evaluation_prompts = num_evaluation_prompts
        self._seed, self._max_turns = seed, max_turns

    def prompt(self, index: int) -> Prompt:
        return _pose(random.Random(f"training:{self._seed}:{index}"), held_out=False)

    def evaluation_prompt(self, n: int) -> Prompt:
        if not 1 <= n <= self.num_evaluation_prompts:
            raise ValueError(f"Shop: held-out task {n} asked for, expected 1 to {self.num_evaluation_prompts}")
        return _pose(random.Random(f"evaluation:{n}"), held_out=True)

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        numbers = _NUMBER.findall(completion.replace(",", ""))
        correct = float(numbers[-1:] == [prompt.answer])
        return Reward(value=correct, parts={"correct": correct})

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        messages: list[Json] = [
            *EXAMPLE,
            *(each.openai for each in prompt.messages or ()),
        ]
        parts = {"correct": 0.0, "multiplied": 0.0, "asked": 0.0}
        wanted = {"price": ("asked", told(prompt.metadata["price"])), "multiply": ("multiplied", prompt.answer)}
        for _ in range(self._max_turns):
            reply = await conversation.chat(messages, tools=TOOLS)
            if not (calls := reply.get("tool_calls")):
                parts |= self.reward(prompt, reply["content"] or "").parts
                break
            messages.append(reply)
            for call in calls:
                name = call["function"]["name"]
                result = run_tool(prompt, name, call["function"]["arguments"])
                for part, right in [wanted[name]] if name in wanted else ():
                    parts[part] = max(parts[part], float(result == right))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return Reward(value=max(parts["correct"], parts["multiplied"] / 2), parts=parts)


def run_tool(prompt: Prompt, name: str, arguments: str) -> str:
    """Returns the result of a call, or what is wrong with it, so that the model can try again."""
    try:
        match name, json.loads(arguments):
            case "price", {"item": str(item)}:
                known = item in (prompt.metadata["item"], prompt.metadata["items"])
                return told(prompt.metadata["price"]) if known else f"error: no {item[:40]!a} here"
            case "multiply", {"a": int(a), "b": int(b)} if max(abs(a), abs(b)) < 10**6:
                return str(a * b)
            case (("price" | "multiply"), _):
                return f"error: expected {_SIGNATURES[name]}"
    except ValueError:
        return "error: the arguments are not JSON"
    return f"error: no tool {name[:40]!a}, expected price or multiply"


_SIGNATURES = {"price": "price(item: string)", "multiply": "multiply(a: integer, b: integer)"}


def told(price: str) -> str:
    return f"One costs {price} dollars."


def _pose(draw: random.Random, *, held_out: bool) -> Prompt:
    items = [item for n, item in enumerate(ITEMS) if (n % HELD_OUT_ONE_IN == 0) is held_out and item != "lamp"]
    item, number, price = draw.choice(items), draw.randint(FEWEST, MOST), draw.randint(CHEAPEST, DEAREST)
    plural = f"{item}{'es' if item.endswith(('s', 'x', 'ch', 'sh')) else 's'}"
    return Prompt(
        messages=(Message(role="user", content=f"How many dollars do {number} {plural} cost?"),),
        answer=str(number * price),
        metadata={"item": item, "items": plural, "price": str(price)},
    )


def _called(name: str, **arguments: Any) -> Json:
    call = {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


EXAMPLE: list[Json] = [
    {"role": "user", "content": "How many dollars do 4 lamps cost?"},
    _called("price", item="lamp"),
    {"role": "tool", "tool_call_id": "call-price", "content": told("23")},
    _called("multiply", a=4, b=23),
    {"role": "tool", "tool_call_id": "call-multiply", "content": "92"},
    {"role": "assistant", "content": "92"},
]
