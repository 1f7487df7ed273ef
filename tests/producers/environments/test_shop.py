"""The shop: what it poses, what its tools answer, and what a conversation is worth."""

import asyncio
import json

import pytest

from penstock.producers.environments.shop import ITEMS, TOOLS, Shop, run_tool
from scripted_conversation import ScriptedConversation

SHOP = Shop(seed=3)
TASK = SHOP.prompt(1)
ITEM, PRICE, TOTAL = TASK.metadata["item"], int(TASK.metadata["price"]), TASK.answer
TOLD = f"One costs {PRICE} dollars."
NUMBER = int(TOTAL) // PRICE


def call(name: str, **arguments: object) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"{name}1", "type": "function", "function": function}]}


PRICED, MULTIPLIED = call("price", item=ITEM), call("multiply", a=NUMBER, b=PRICE)


def test_a_task_asks_for_what_only_the_tool_knows_and_held_out_items_are_never_trained_on() -> None:
    assert f"How many dollars do {NUMBER} {TASK.metadata['items']} cost?" == TASK.messages[0].content
    assert Shop(seed=3).prompt(7) == SHOP.prompt(7) and len({SHOP.prompt(n).answer for n in range(1, 99)}) > 40
    trained = {SHOP.prompt(n).metadata["item"] for n in range(1, 2000)}
    held_out = {SHOP.evaluation_prompt(n).metadata["item"] for n in range(1, 65)}
    assert trained | held_out <= set(ITEMS) and not trained & held_out and len(held_out) > 10
    for settings, said in (({"max_turns": 0}, "max_turns is 0"), ({"num_evaluation_prompts": -1}, "is -1")):
        with pytest.raises(ValueError, match=said):
            Shop(seed=3, **settings)
    with pytest.raises(ValueError, match="held-out task 65 asked for"):
        SHOP.evaluation_prompt(65)


def test_each_call_has_a_result_or_is_told_what_is_wrong_with_it() -> None:
    for name, arguments, said in [
        ("price", {"item": ITEM}, TOLD),
        ("price", {"item": TASK.metadata["items"]}, TOLD),
        ("price", {"item": "lamp"}, "error: no 'lamp' here"),
        ("price", {"item": 4}, "error: expected price(item: string)"),
        ("price", {"name": ITEM}, "error: expected price(item: string)"),
        ("multiply", {"a": -3, "b": 7}, "-21"),
        ("multiply", {"a": 10**6, "b": 7}, "error: expected multiply(a: integer, b: integer)"),
        ("multiply", {"a": "3", "b": 7}, "error: expected multiply(a: integer, b: integer)"),
        ("multiply", [3, 7], "error: expected multiply(a: integer, b: integer)"),
        ("divide", {}, "error: no tool 'divide', expected price or multiply"),
    ]:
        assert run_tool(TASK, name, json.dumps(arguments)) == said
    assert run_tool(TASK, "price", "{") == "error: the arguments are not JSON"


@pytest.mark.parametrize(
    ("answers", "read", "worth"),
    [
        ((PRICED, MULTIPLIED, f"{TOTAL} dollars"), [TOLD, TOTAL], (1, 1, 1)),
        ((PRICED, "99999"), [TOLD], (0, 1, 0)),
        ((TOTAL,), [], (1, 0, 0)),
        ((call("multiply", a=2, b=2), PRICED, f"{TOTAL}."), ["4", TOLD], (1, 1, 0)),
        ((PRICED,) * 4, [TOLD] * 3, (0, 1, 0)),
        ((PRICED, MULTIPLIED, "I do not know"), [TOLD, TOTAL], (0.5, 1, 1)),
    ],
)
def test_a_conversation_ends_with_an_answer_or_after_its_turns(answers, read, worth) -> None:
    conversation = ScriptedConversation(*answers)
    reward = asyncio.run(SHOP.converse(TASK, conversation))
    assert (reward.value, reward.parts["asked"], reward.parts["multiplied"]) == worth
    assert conversation.read[0] == TASK.messages[0].content and conversation.read[1:] == read
    assert all(fields == {"tools": TOOLS} for fields in conversation.fields)
