import asyncio
import json

import pytest

from penstock.producers.environments.calculator import (
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


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47*83-26", 3875),
        (" 2 * ( 3 + 4 ) ", 14),
        ("2-3-4", -5),
        ("2-3*4", -10),
        ("-3*-(2+1)", 9),
        ("--+5", 5),
        ("007", 7),
        ("9" * 50 + "*" + "9" * 49, int("9" * 50) * int("9" * 49)),
    ],
)
def test_an_expression_is_computed(expression: str, value: int) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", " ", "()", "1+", "*2", "1 2", "(1", "1)", "1+(2", "2**3", "9**9**9**9", "1/0", "1.5", "1e9", "0x10", "1_0",
        "٣", "a", "__import__('os').system('true')", "(lambda:1)()", "[0]*9", "1;2", "1\x002", "the end", "1" * 101,
    ],
)  # fmt: skip
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        evaluate(expression)


@pytest.mark.parametrize("expression", ["(" * 50 + ")" * 50, "(" * MAX_EXPRESSION, "-" * MAX_EXPRESSION])
def test_the_deepest_expression_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        evaluate(expression)
    assert evaluate("(" * 49 + "7" + ")" * 49) == 7


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("calculator", '{"expression": "47*83-26"}', "3875"),
        ("calculator", '{"expression": "47*83-"}', "error: expected a number, found the end"),
        ("calculator", '{"expression": "(47"}', "error: expected ), found the end"),
        ("calculator", '{"expression": "4^2"}', "error: expected integers, + - * and parentheses"),
        ("calculator", '{"expression": "' + "1" * 200 + '"}', "error: 200 characters, expected at most 100"),
        ("calculator", '{"expression": 5}', 'error: expected {"expression": "2*(3+4)"}'),
        ("calculator", '{"expression": ["1"]}', 'error: expected {"expression": "2*(3+4)"}'),
        ("calculator", '{"expr": "1"}', 'error: expected {"expression": "2*(3+4)"}'),
        ("calculator", "[]", 'error: expected {"expression": "2*(3+4)"}'),
        ("calculator", "1+1", 'error: expected {"expression": "2*(3+4)"}'),
        ("calculator", "[" * 100_000, 'error: expected {"expression": "2*(3+4)"}'),
        ("shell", '{"expression": "1"}', "error: no tool 'shell', expected calculator"),
        ("÷" * 100, "{}", "error: no tool '" + "\\xf7" * 40 + "', expected calculator"),
    ],
)
def test_the_tool_answers_every_call_with_text(name: str, arguments: str, said: str) -> None:
    assert run_tool(name, arguments) == said


def test_a_call_and_its_result_repeated_are_worth_1() -> None:
    script = Script(answer(None, call("47*83-26")), answer("3875"))
    assert converse(script) == Reward(value=1.0, parts={"exact": 1.0, "called": 1.0})
    assert script.messages == [
        {"role": "user", "content": "What is 47*83-26?"},
        answer(None, call("47*83-26")),
        {"role": "tool", "tool_call_id": "c1", "content": "3875"},
    ]


def test_an_answer_from_the_head_counts_as_one_without_a_call() -> None:
    assert converse(Script(answer("3875"))) == Reward(value=1.0, parts={"exact": 1.0, "called": 0.0})
    assert converse(Script(answer("3874"))) == Reward(value=0.0, parts={"exact": 0.0, "called": 0.0})
    assert converse(Script(answer(None))).value == 0.0


def test_a_malformed_call_is_answered_with_what_is_wrong_and_may_be_made_again() -> None:
    script = Script(answer(None, call("47*83-")), answer(None, call("47*83-26", call_id="c2")), answer("3875"))
    assert converse(script) == Reward(value=1.0, parts={"exact": 1.0, "called": 1.0})
    results = [message for message in script.messages if message["role"] == "tool"]
    assert [(result["tool_call_id"], result["content"]) for result in results] == [
        ("c1", "error: expected a number, found the end"),
        ("c2", "3875"),
    ]


def test_an_error_alone_is_no_call() -> None:
    assert converse(Script(answer(None, call("4^")), answer("3875"))).parts["called"] == 0.0


def test_calls_side_by_side_are_answered_in_their_order() -> None:
    script = Script(answer(None, call("47*83"), call("3901-26", call_id="c2")), answer("3875"))
    assert converse(script).value == 1.0
    assert [message["content"] for message in script.messages[2:]] == ["3901", "3875"]


def test_a_conversation_ends_after_its_turns() -> None:
    script = Script(*[answer(None, call("47*83-26"))] * 9)
    assert converse(script, max_turns=3) == Reward(value=0.0, parts={"exact": 0.0, "called": 1.0})
    assert script.num_turns == 3


@pytest.mark.parametrize(
    ("completion", "worth"),
    [
        ("3875", 1.0), (" 3875.\n", 1.0), ("47*83 is 3901, less 26: **3,875**", 1.0), ("3901-3875", 1.0),
        ("-3875", 0.0), ("3875 or 3876", 0.0), ("38750", 0.0), ("", 0.0), ("none", 0.0),
    ],
)  # fmt: skip
def test_the_last_number_of_an_answer_counts(completion: str, worth: float) -> None:
    assert CalculatorTasks(seed=0).reward(TASK, completion).value == worth


def test_a_negative_answer_needs_its_sign() -> None:
    task = Prompt(messages=TASK.messages, answer="-5")
    tasks = CalculatorTasks(seed=0)
    assert [tasks.reward(task, said).value for said in ("-5", "it is -5", "5", "9-5")] == [1.0, 1.0, 0.0, 0.0]


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


def test_operands_have_their_width() -> None:
    tasks = CalculatorTasks(seed=0, width=4, num_operands=5)
    expression = tasks.prompt(1).metadata["expression"]
    assert len(expression) == 5 * 4 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "width is 0, expected 1 to 9"),
        ({"num_operands": 1}, "num_operands is 1, expected 2 to 8"),
        ({"num_evaluation_prompts": -1}, "num_evaluation_prompts is -1, expected 0 to 4096"),
        ({"max_turns": 0}, "max_turns is 0, expected 1 to 64"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Calculator(seed=0, **arguments)


@pytest.mark.parametrize("n", [0, 65])
def test_a_held_out_task_that_is_not_there_is_an_error(n: int) -> None:
    with pytest.raises(ValueError, match=f"held-out problem {n} asked for, expected 1 to 64"):
        CalculatorTasks(seed=0).evaluation_prompt(n)
