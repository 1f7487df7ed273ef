"""Functions that are written and tested in a sandbox."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.producers.environments.code import CodeJsonl, CodeTasks, Functions, program_in, split_test
from penstock.producers.environments.code_harness import canonical, digest
from penstock.schemas.prompt import Prompt, Reward

TESTS = ["assert f(1) == 2", "assert f(-3) == -6", "assert f('ab') == 'abab'", "assert abs(f(0.1) - 0.2) < 1e-9"]
PROGRAMS = {
    "right": ("def f(x): return 2 * x", 4, True),
    "half right": ("def f(x): return abs(x) + abs(x)", 2, True),
    "of other types that are equal": (
        "class I(int): pass\ndef f(x): return 2.0 * x if x in (1, -3) else x + x",
        4,
        True,
    ),
    "in words": ("Here it is", 0, False),
    "empty": ("", 0, True),
    "with another name": ("def g(x): return 2 * x", 0, True),
    "not text": ("def f(x): return '\udcff\0'", 0, False),
    "ends at once": ("import os; os._exit(0)", 0, False),
    "exits": ("raise SystemExit(0)", 0, False),
    "exits in a test": ("def f(x): raise SystemExit(0)", 0, True),
    "hangs": ("while True: pass", 0, False),
    "hangs in one test": ("def f(x):\n while x == 1: pass\n return 2 * x", 3, True),
    "prints what looks like results": ("def f(x): print('[0, \"2\"]'); return 0", 0, True),
    "equals everything": (
        "class A:\n def __eq__(s, o): return True\n __repr__ = lambda s: '2'\ndef f(x): return A()",
        0,
        True,
    ),
    "holds itself": ("x = []; x.append(x)\ndef f(_): return x", 0, True),
    "returns what is very long": ("def f(x): return 'x' * (1 << 20) if x == 1 else 2 * x", 3, True),
    "a number of many digits": ("def f(x): return 10 ** 5000", 0, True),
    "closes everything": ("import os; os.closerange(0, 99)\ndef f(x): return 2 * x", 0, False),
    "kills": ("import os; os.kill(os.getppid(), 9); os.kill(-1, 9)\ndef f(x): return 2 * x", 0, False),
    "leaves a process": ("import os, time\nif not os.fork(): time.sleep(999)\ndef f(x): return 2 * x", 4, True),
}


async def reward_of(environment: CodeTasks, program: str, tests: list[str] = TESTS) -> Reward:
    return await environment.reward(Prompt(text="f", metadata={"tests": json.dumps(tests)}), program)


@pytest.mark.parametrize("name", PROGRAMS)
async def test_the_reward_is_the_share_of_tests_that_pass(name: str) -> None:
    program, passed, runs = PROGRAMS[name]
    reward = await reward_of(CodeTasks(test_timeout_s=1), program)
    assert reward == Reward(
        value=passed / 4, parts={"passed": passed / 4, "solved": float(passed == 4), "runs": float(runs)}
    )


async def test_all_tests_or_nothing() -> None:
    program = "def f(x): return abs(x) + abs(x)"
    assert (await reward_of(CodeTasks(score="all"), program)).value == 0.0
    assert (await reward_of(CodeTasks(score="all"), program, TESTS[:1])).value == 1.0


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("Sure:\n```python\nx = 1\n```\nIt is 1.\n```python\nx = 2\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1", "x = 1"),
    ],
)
def test_the_program_is_the_first_block_of_code_or_everything(completion: str, program: str) -> None:
    assert program_in(completion) == program


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("assert f(1, 2) == {3: 'x', 1: [True]}", ("f(1, 2)", digest({1: [True], 3: "x"}))),
        ("assert f(1) == 2.0", ("f(1)", digest(2))),
        ("assert f() == set(g())", ("assert f() == set(g())", None)),
        ("assert f() == 1 == 1.0", ("assert f() == 1 == 1.0", None)),
        ("x = f()\nassert x == 1", ("x = f()\nassert x == 1", None)),
    ],
)
def test_what_a_call_should_return_stays_outside_the_sandbox(test: str, found: tuple[str, str | None]) -> None:
    assert split_test(test) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({1: [True], 3: "x"}, "d{1:l[1],3:'x'}"),
        ({3: "x", 1.0: [1]}, "d{1:l[1],3:'x'}"),
        ({2, 1}, "s{1,2}"),
        ((1, None, 0.5), "t[1,None,0.5]"),
    ],
)
def test_equal_values_have_the_same_text(value: Any, text: str) -> None:
    assert canonical(value) == text


async def test_every_generated_task_is_solved_by_its_answer_and_held_out_tasks_are_never_trained_on() -> None:
    environment = Functions(seed=3)
    training = [environment.prompt(index) for index in range(1, 400)]
    held_out = [environment.evaluation_prompt(n) for n in range(1, 65)]
    assert len({prompt.messages for prompt in held_out}) == 64
    assert {prompt.messages for prompt in training}.isdisjoint(prompt.messages for prompt in held_out)
    assert environment.prompt(7) == Functions(seed=3).prompt(7) != Functions(seed=4).prompt(7)
    assert held_out[5] == Functions(seed=4).evaluation_prompt(6)
    rewards = await asyncio.gather(*(environment.reward(prompt, prompt.answer) for prompt in held_out[:24]))
    assert {reward.value for reward in rewards} == {1.0}


def rows(tmp_path: Path, **changed: Any) -> str:
    row = {"prompt": "Write f.", "tests": TESTS} | changed
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    return str(tmp_path / "tasks.jsonl")


async def test_tasks_of_a_file(tmp_path: Path) -> None:
    environment = CodeJsonl(seed=0, training=rows(tmp_path))
    prompt = environment.prompt(1)
    assert prompt.messages is not None and prompt.messages[0].content == "Write f."
    assert (await environment.reward(prompt, "def f(x): return 2 * x")).value == 1.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tests": []}, "column 'tests' is [], expected a list of tests such as"),
        ({"tests": "assert f(1) == 2"}, "column 'tests' is 'assert f(1) == 2', expected a list"),
        ({"tests": None}, "column 'tests' is None, expected a list"),
        ({"tests": ["assert f(1) =="]}, "'assert f(1) ==' is no Python"),
    ],
)
def test_a_file_without_tests_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        CodeJsonl(seed=0, training=rows(tmp_path, **changed))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"score": "some"}, "score is 'some', expected"),
        ({"test_timeout_s": 0}, "test_timeout_s is 0, expected"),
        ({"limits": {"wall_s": -1}}, "wall_s is -1"),
        ({"limits": {"walls": 1}}, "unknown field `walls`"),
    ],
)
def test_settings_that_cannot_be(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        CodeTasks(**kwargs)
    assert message in str(refused.value)
