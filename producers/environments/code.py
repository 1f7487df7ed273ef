"""Tasks to write a Python function; hidden tests of it run in a sandbox."""

import ast
import json
import random
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.producers.environments import code_harness
from penstock.producers.environments.dataset import Dataset, unlike
from penstock.producers.environments.rows import DataRows
from penstock.producers.environments.sandbox import PYTHON, Limits, Sandboxes
from penstock.schemas.prompt import Message, Prompt, Reward

HELD_OUT_ONE_IN = 8
NUM_TESTS = 6
_HARNESS = Path(code_harness.__file__).read_text("utf-8")
_FENCE = re.compile(r"```[ \t]*(?:python|py|Python)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class CodeTasks:
    """Scores completions by tests of the function in them.

    A test is a line of Python. Of `assert f(2) == 4` only the call runs in the sandbox, and what it returns is compared
    outside: a program can pass it only by computing the value, which must be of Python's own types. Other tests run
    beside the program, which could fake them.

    test_timeout_s: whole seconds for the program, and for each test. limits: of the sandbox; see `sandbox.Limits`.
    score: "share" of the tests that pass, or "all": 1 if all do, else 0.
    """

    def __init__(
        self, *, score: str = "share", test_timeout_s: int = 2, limits: Mapping[str, Any] | None = None
    ) -> None:
        if score not in ("share", "all"):
            raise ValueError(f"score is {score!r}, expected 'share' or 'all'")
        if test_timeout_s < 1:
            raise ValueError(f"test_timeout_s is {test_timeout_s}, expected at least 1")
        self._score, self._test_timeout_s = score, test_timeout_s
        self._sandboxes = Sandboxes(msgspec.convert(dict(limits or {}), Limits))

    async def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Returns the reward, with the parts `passed`, the share of tests, `solved`, 1 if all pass, and `runs`, 1 for a
        program that raises nothing by itself.

        Raises:
            SandboxError: the sandbox has failed.
        """
        tests: list[str] = json.loads(prompt.metadata["tests"])
        passed, runs = await self._run(program_in(completion), tests)
        share, solved = passed / len(tests), float(passed == len(tests))
        value = share if self._score == "share" else solved
        return Reward(value=value, parts={"passed": share, "solved": solved, "runs": float(runs)})

    async def _run(self, program: str, tests: Sequence[str]) -> tuple[int, bool]:
        """Returns how many tests pass, and whether the program itself runs."""
        split = [split_test(test) for test in tests]
        key = secrets.token_hex(8)
        task = {
            "key": key,
            "program": program,
            "tests": [("test" if expected is None else "call", source) for source, expected in split],
            "timeout_s": self._test_timeout_s,
        }
        async with self._sandboxes.open() as sandbox:
            result = await sandbox.run([*PYTHON, _HARNESS], stdin=json.dumps(task).encode())
        lines = [line.split() for line in result.stdout.decode(errors="replace").splitlines()]
        found = {line[1]: line[2] for line in reversed(lines) if len(line) == 3 and line[0] == key}
        wanted = ["passed" if expected is None else expected for _, expected in split]
        return sum(found.get(str(number)) == each for number, each in enumerate(wanted)), "-1" in found


class CodeJsonl(CodeTasks, Dataset):  # type: ignore[misc]  # its reward is a coroutine
    """A `Dataset` of `{"prompt": "Write a function ...", "tests": ["assert f(2) == 4", ...]}`, scored by `CodeTasks`.

    tests: the column of the tests, a list of strings. All other arguments are those of the two classes.

    Raises:
        ValueError: also for tests that are none, or are no Python.
    """

    def __init__(
        self,
        *,
        tests: str = "tests",
        score: str = "share",
        test_timeout_s: int = 2,
        limits: Mapping[str, Any] | None = None,
        columns: Mapping[str, str] = {"prompt": "prompt"},
        **dataset: Any,
    ) -> None:
        self._tests = tests
        CodeTasks.__init__(self, score=score, test_timeout_s=test_timeout_s, limits=limits)
        Dataset.__init__(self, columns=columns, **dataset)

    def _read(self) -> list[str]:
        return [*super()._read(), self._tests]

    def _pose(self, rows: DataRows, number: int) -> Prompt:
        prompt = super()._pose(rows, number)
        tests, place = rows[number].get(self._tests), rows.place(number)
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise unlike(tests, self._tests, place, "a list of tests such as 'assert f(2) == 4'")
        for test in tests:
            try:
                ast.parse(test)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"{place}: column {self._tests!r}: {test[:80]!r} is no Python: {error}") from None
        return msgspec.structs.replace(prompt, metadata={**prompt.metadata, "tests": json.dumps(tests)})


class Functions(CodeTasks):
    """Small functions of numbers, lists and strings, made here: `Write a Python function f(x) that returns x times 3
    plus 4.` Whether a task is held out depends on its text alone, so that all seeds agree on what is never trained on.

    num_evaluation_prompts: how many of the held-out tasks to use.
    """

    def __init__(self, *, seed: int, num_evaluation_prompts: int = 64, **tested: Any) -> None:
        super().__init__(**tested)
        self._seed, self.num_evaluation_prompts = seed, num_evaluation_prompts
        self._evaluation: list[Prompt] = []
        held_out = _tasks("evaluation", held_out=True)
        while len(self._evaluation) < num_evaluation_prompts:
            if (found := next(held_out)) not in self._evaluation:
                self._evaluation.append(found)

    def prompt(self, index: int) -> Prompt:
        return next(_tasks(f"training:{self._seed}:{index}", held_out=False))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._evaluation[n - 1]


def program_in(completion: str) -> str:
    """Returns the program in a completion: the first fenced block, an unfinished one too, or all of it."""
    fenced = _FENCE.search(completion)
    return fenced[1] if fenced else completion


def split_test(test: str) -> tuple[str, str | None]:
    """Returns the call and the digest of the value of `assert CALL == VALUE`; None as the value for other tests."""
    match ast.parse(test.strip()).body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                return ast.unparse(left), code_harness.digest(ast.literal_eval(right))
            except (ValueError, TypeError):
                pass
    return test, None


Kind = Callable[[random.Random], tuple[str, str, str, Callable[[random.Random], Any]]]
"""Draws a task: the argument's name, what is returned, an expression for it, and what draws an argument."""

_FILTERS = {
    "even": "n % 2 == 0",
    "odd": "n % 2 == 1",
    "positive": "n > 0",
    "negative": "n < 0",
    **{f"greater than {k}": f"n > {k}" for k in range(1, 10)},
    **{f"divisible by {k}": f"n % {k} == 0" for k in range(3, 10)},
}
_FOLDS = {"the sum of": "sum([{}])", "how many there are of": "len([{}])", "a list of": "[{}]"}
_LETTERS = "abcdelnorst"
_TEXTS = {
    "s reversed": "s[::-1]",
    "s in upper case": "s.upper()",
    "s without spaces": "s.replace(' ', '')",
    "the number of words in s": "len(s.split())",
    "the last character of s": "s[-1]",
    "the first word of s": "s.split()[0]",
    "a list of the words in s": "s.split()",
    "the number of vowels in s": "sum(c in 'aeiou' for c in s)",
    **{f"s repeated {k} times": f"s * {k}" for k in range(2, 10)},
    **{f"the first {k} characters of s": f"s[:{k}]" for k in range(2, 6)},
    **{f"s without its last {k} characters": f"s[:-{k}]" for k in range(2, 6)},
    **{f"how many times the letter {c!r} occurs in s": f"s.count({c!r})" for c in _LETTERS},
}


def _number(draw: random.Random) -> int:
    return draw.randrange(-20, 21)


def _numbers(draw: random.Random) -> list[int]:
    return [_number(draw) for _ in range(draw.randrange(1, 9))]


def _words(draw: random.Random) -> str:
    return " ".join(
        "".join(draw.choices("abcdefghijklmnoprstu", k=draw.randrange(3, 7))) for _ in range(draw.randrange(2, 5))
    )


def _linear(draw: random.Random) -> tuple[str, str, str, Any]:
    factor, sign, term = draw.randrange(2, 13), draw.choice(["plus", "minus"]), draw.randrange(1, 21)
    return "x", f"x times {factor} {sign} {term}", f"x * {factor} {'+' if sign == 'plus' else '-'} {term}", _number


def _question(draw: random.Random) -> tuple[str, str, str, Any]:
    name = draw.choice(list(_FILTERS))
    return "n", f"True if n is {name} and False otherwise", _FILTERS[name], _number


def _folded(draw: random.Random) -> tuple[str, str, str, Any]:
    fold, name = draw.choice(list(_FOLDS)), draw.choice(list(_FILTERS))
    expression = _FOLDS[fold].format(f"n for n in numbers if {_FILTERS[name]}")
    return "numbers", f"{fold} the numbers in the list that are {name}", expression, _numbers


def _mapped(draw: random.Random) -> tuple[str, str, str, Any]:
    verb, sign = draw.choice([("multiplied by", "*"), ("increased by", "+"), ("decreased by", "-")])
    amount = draw.randrange(2, 21)
    return "numbers", f"a list of the numbers {verb} {amount}", f"[n {sign} {amount} for n in numbers]", _numbers


def _text(draw: random.Random) -> tuple[str, str, str, Any]:
    name = draw.choice(list(_TEXTS))
    return "s", f"{name}, where s is a string", _TEXTS[name], _words


KINDS: tuple[Kind, ...] = (_linear, _question, _folded, _mapped, _text)


def _tasks(key: str, *, held_out: bool) -> Iterator[Prompt]:
    """Yields tasks of one side of the split without end, the same for the same key."""
    draw = random.Random(key)
    while True:
        argument, returned, expression, argument_of = draw.choice(KINDS)(draw)
        text = f"Write a Python function f({argument}) that returns {returned}. Answer with the code alone."
        if (random.Random(text).randrange(HELD_OUT_ONE_IN) == 0) is held_out:
            inputs = random.Random(text)
            function = eval(f"lambda {argument}: {expression}")  # one of the expressions above
            given = [argument_of(inputs) for _ in range(NUM_TESTS)]
            yield Prompt(
                messages=(Message(role="user", content=text),),
                answer=f"def f({argument}):\n    return {expression}\n",
                metadata={"tests": json.dumps([f"assert f({each!r}) == {function(each)!r}" for each in given])},
            )
