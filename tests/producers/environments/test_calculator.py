import asyncio
import json

import pytest

from penstock.producers.environments.calculator import (
    EXPECTED,
    HELD_OUT_ONE_IN,
    MAX_EXPRESSION,
    TOOLS,
    Calculator,
    CalculatorTasks,
    evaluate,
    run_tool,
)
from penstock.schemas.prompt import Message, Prompt, Reward

TASK = Prompt(messages=(Message(role="user", content="What is 47*83-26?"),), answer="3875")


def call(expression: object, name: str = "calculator", call_id: str = "c1") -> dict:
    function = {"name": name, "arguments": json.dumps({"expression": expression})}
    return {"id": call_id, "type": "function", "function": function}


def answer(content: str | None, *calls: dict) -> dict:
    message = {"role": "assistant", "content": content}
    return message | {"tool_calls": list(calls)} if calls else message


class Script:
    """A conversation whose answers are written beforehand."""

    def __init__(self, *answers: dict) -> None:
        self._answers = list(answers)
        self.messages: list[dict] = []
        self.num_turns = 0

    async def chat(self, messages: list[dict], **fields: object) -> dict:
        assert fields == {"tools": TOOLS}
        self.messages = list(messages)
        self.num_turns += 1
        return self._answers.pop(0)


def converse(script: Script, **settings: int) -> Reward:
    return asyncio.run(Calculator(seed=0, **settings).converse(TASK, script))


def test_an_expression_is_computed_and_anything_else_refused() -> None:
    for expression, value in [
        ("47*83-26", 3875), (" 2 * (\n 3 + 4 ) ", 14), ("2-3-4", -5), ("2-3*4", -10), ("-3*-(2+1)", 9), ("--+5", 5),
        ("007+100", 107), ("(" * 49 + "7" + ")" * 49, 7),
        ("9" * 50 + "*" + "9" * 49, int("9" * 50) * int("9" * 49)),
    ]:  # fmt: skip
        assert evaluate(expression) == value, expression
    for expression in (
        "", " ", "()", "1+", "*2", "1 2", "(1", "1)", "1+(2", "1)+(2", "2**3", "9**9**9**9", "2(3)", "1/0", "1.5",
        "1e9", "0x10", "1_0", "٣", "a", "__import__('os').system('true')", "(lambda:1)()", "[0]*9", "1;2", "1\x002",
        "1" * 101, "(" * 50 + ")" * 50, "(" * MAX_EXPRESSION, "-" * MAX_EXPRESSION,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            evaluate(expression)


def test_the_tool_answers_every_call_with_text() -> None:
    malformed = 'error: expected {"expression": "2*(3+4)"}'
    for name, arguments, said in [
        ("calculator", '{"expression": "47*83-26"}', "3875"),
        ("calculator", '{"expression": "47*83-"}', f"error: {EXPECTED}"),
        ("calculator", '{"expression": "' + "1" * 200 + '"}', "error: 200 characters, expected at most 100"),
        *(
            ("calculator", wrong, malformed)
            for wrong in ('{"expression": 5}', '{"expr": "1"}', "[]", "1+1", "[" * 9**5)
        ),
        ("shell", '{"expression": "1"}', "error: no tool 'shell', expected calculator"),
        ("÷" * 100, "{}", "error: no tool '" + "\\xf7" * 40 + "', expected calculator"),
    ]:
        assert run_tool(name, arguments) == said


def test_a_call_and_its_result_repeated_are_worth_1_and_an_answer_from_the_head_counts_as_one_without() -> None:
    script = Script(answer(None, call("47*83-26")), answer("3875"))
    assert converse(script) == Reward(value=1.0, parts={"exact": 1.0, "called": 1.0})
    assert script.messages == [
        {"role": "user", "content": "What is 47*83-26?"},
        answer(None, call("47*83-26")),
        {"role": "tool", "tool_call_id": "c1", "content": "3875"},
    ]
    for said, exact in (("3875", 1.0), ("3874", 0.0), (None, 0.0)):
        assert converse(Script(answer(said))) == Reward(value=exact, parts={"exact": exact, "called": 0.0})


def test_calls_are_answered_in_their_order_up_to_the_last_turn_and_a_malformed_one_may_be_made_again() -> None:
    assert converse(Script(answer(None, call("4^")), answer("3875"))).parts["called"] == 0.0
    script = Script(answer(None, call("47*83-")), answer(None, call("47*83-26", call_id="c2")), answer("3875"))
    assert converse(script) == Reward(value=1.0, parts={"exact": 1.0, "called": 1.0})
    results = [message for message in script.messages if message["role"] == "tool"]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [
        ("c1", f"error: {EXPECTED}"),
        ("c2", "3875"),
    ]
    script = Script(answer(None, call("47*83"), call("3901-26", call_id="c2")), answer("3875"))
    assert converse(script).value == 1.0
    assert [message["content"] for message in script.messages[2:]] == ["3901", "3875"]
    endless = Script(*[answer(None, call("47*83-26"))] * 9)
    assert converse(endless, max_turns=3) == Reward(value=0.0, parts={"exact": 0.0, "called": 1.0})
    assert endless.num_turns == 3


def test_the_last_number_of_an_answer_counts_with_its_sign() -> None:
    negative = Prompt(messages=TASK.messages, answer="-5")
    for task, completion, worth in [
        (TASK, "3875", 1.0), (TASK, " 3875.\n", 1.0), (TASK, "47*83 is 3901, less 26: **3,875**", 1.0),
        (TASK, "3901-3875", 1.0), (TASK, "-3875", 0.0), (TASK, "3875 or 3876", 0.0), (TASK, "38750", 0.0),
        (TASK, "", 0.0), (TASK, "none", 0.0),
        (negative, "-5", 1.0), (negative, "it is -5", 1.0), (negative, "5", 0.0), (negative, "9-5", 0.0),
    ]:  # fmt: skip
        assert CalculatorTasks(seed=0).reward(task, completion).value == worth, completion


def test_tasks_are_the_same_for_one_seed_and_others_for_another() -> None:
    first, same, other = CalculatorTasks(seed=3), CalculatorTasks(seed=3), CalculatorTasks(seed=4)
    tasks = [first.prompt(index) for index in range(1, 50)]
    assert tasks == [same.prompt(index) for index in range(1, 50)]
    assert tasks != [other.prompt(index) for index in range(1, 50)]
    assert len({task.answer for task in tasks}) > 40
    for task in tasks:
        assert task.messages[0].content == f"What is {task.metadata['expression']}?"
        assert task.answer == str(evaluate(task.metadata["expression"]))


def test_held_out_tasks_are_never_trained_on_whatever_the_seed() -> None:
    settings = {"width": 1, "num_operands": 2}  # so few that any overlap would show
    tasks = CalculatorTasks(seed=0, num_evaluation_prompts=200, **settings)
    held_out = {tasks.evaluation_prompt(n).metadata["expression"] for n in range(1, 201)}
    others = [CalculatorTasks(seed=seed, **settings) for seed in (1, 2)]
    trained = {other.prompt(index).metadata["expression"] for other in others for index in range(1, 1000)}
    assert held_out.isdisjoint(trained)
    assert abs(len(held_out) / (9 * 9 * 3) - 1 / HELD_OUT_ONE_IN) < 0.05
    assert len(held_out | trained) > 230
    same = CalculatorTasks(seed=7, num_evaluation_prompts=200, **settings)
    assert same.evaluation_prompt(200) == tasks.evaluation_prompt(200)


def test_impossible_settings_are_refused() -> None:
    for arguments, message in [
        ({"width": 0}, "width is 0, expected 1 to 9"),
        ({"num_operands": 1}, "num_operands is 1, expected 2 to 8"),
        ({"num_evaluation_prompts": -1}, "num_evaluation_prompts is -1, expected 0 to 4096"),
        ({"max_turns": 0}, "max_turns is 0, expected 1 to 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            Calculator(seed=0, **arguments)
    with pytest.raises(ValueError, match="held-out problem 65 asked for, expected 1 to 64"):
        CalculatorTasks(seed=0).evaluation_prompt(65)
