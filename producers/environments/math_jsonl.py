"""Mathematical problems from a JSONL file, asked through the chat template and scored by math-verify."""

import functools
import logging
import math
import multiprocessing
import re
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from penstock.producers.environments.permutation import task_of
from penstock.schemas.prompt import Message, Prompt, Reward

logger = logging.getLogger(__name__)

MOST_CHECKED = 256
_PLAIN = re.compile(
    r"-?\$?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?%?"  # 22, -1,200.50, $18, 5%
    r"|-?\d+/\d+|-?\\[dt]?frac\{-?\d+\}\{-?\d+\}"
)
_NO_WORDS = re.compile(r"\\(text\w*|mbox|mathrm|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
"""Matches words that LaTeX marks as text, and its commands."""
_WORD = re.compile(r"[A-Za-z]{2,}")
_SENTENCE = re.compile(r"\b(is|are|was|were|be|has|have|had|it|he|she|they|we|you|answer|therefore)\b", re.IGNORECASE)
_MOST_WORDS = 3
"""Of an answer, as in `60 miles per hour`. math-verify accepts more words too, as a product of letters."""
_STARTUP_TIMEOUT_S = 120.0
"""For a scoring process to import math-verify on a busy machine."""


class MathProblem(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a problem file. source: its file and line number."""

    text: str
    answer: str
    source: str


class MathJsonl:
    """One JSON object per line, a problem and its final answer: `{"problem": "What is 1/2+1/4?", "answer": "3/4"}`. In
    a worked solution that ends in `#### 22`, like GSM8K's, the answer is what follows the mark.

    An answer that is a sentence is refused: one with more than `_MOST_WORDS` words, or a verb or pronoun, outside
    `\\text{}`. So is one that is not equal to itself by math-verify when the files are opened. Numbers and plain
    fractions always are; of other answers at most `MOST_CHECKED` are checked, spread over the file.

    prompts_file: training problems, shuffled again for each dataset epoch.
    evaluation_file: held-out problems. A training problem with the text of one of them is left out of training.
    system_prompt: a message before every problem; it should say in which form to answer.
    problem_field, answer_field: the names that hold the two strings (an answer may also be a number).
    num_evaluation_prompts: how many of the evaluation file's problems to use, from the first line on; None means all.
    require_boxed: only a completion with a `\\boxed{}` can be correct. If False, math-verify looks for an answer.
    scoring_timeout_s: an answer that takes longer to compare is worth 0.

    The reward is 1 if math-verify finds the completion's answer equal to the file's, else 0.
    """

    reward_threads = 1
    """The scoring process takes one answer at a time."""

    def __init__(
        self,
        *,
        seed: int,
        prompts_file: str,
        evaluation_file: str | None = None,
        system_prompt: str | None = None,
        problem_field: str = "problem",
        answer_field: str = "answer",
        num_evaluation_prompts: int | None = None,
        require_boxed: bool = True,
        scoring_timeout_s: float = 5.0,
    ) -> None:
        self._seed = seed
        self._system_prompt = system_prompt
        self._evaluation = _read_problems(evaluation_file, problem_field, answer_field) if evaluation_file else []
        if num_evaluation_prompts is not None:
            if not 0 <= num_evaluation_prompts <= len(self._evaluation):
                raise ValueError(
                    f"MathJsonl: num_evaluation_prompts is {num_evaluation_prompts}, "
                    f"expected 0 to {len(self._evaluation)}, the problems in evaluation_file {evaluation_file!r}"
                )
            self._evaluation = self._evaluation[:num_evaluation_prompts]
        self.num_evaluation_prompts = len(self._evaluation)
        self._training = self._without_held_out(_read_problems(prompts_file, problem_field, answer_field), prompts_file)
        self.num_tasks = len(self._training)
        self._require_boxed = require_boxed
        self._scorer = _Scorer(scoring_timeout_s)
        for problems in (self._training, self._evaluation):
            self._check_answers(problems)
        self._scorer.stop()  # the first reward starts it again: not everyone who opens the files asks for one

    def prompt(self, index: int) -> Prompt:
        return self._ask(self._training[task_of(index, self.num_tasks, self._seed)])

    def evaluation_prompt(self, n: int) -> Prompt:
        if not 1 <= n <= self.num_evaluation_prompts:
            raise ValueError(f"MathJsonl: held-out problem {n} asked for, expected 1 to {self.num_evaluation_prompts}")
        return self._ask(self._evaluation[n - 1])

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        correct = _is_right(self._scorer, prompt, completion, self._require_boxed)
        return Reward(value=correct, parts={"correct": correct})

    def _check_answers(self, problems: list[MathProblem]) -> None:
        odd = list({p.answer: p for p in problems if not _PLAIN.fullmatch(p.answer)}.values())
        checked = odd[:: max(1, math.ceil(len(odd) / MOST_CHECKED))]
        wrong = [p for p in checked if not self._scorer.is_correct(p.answer, _boxed(p.answer))]
        if wrong:
            raise ValueError(
                f"MathJsonl: {len(wrong)} of {len(checked)} answers are not right by their own measure, first "
                f"{wrong[0].source}: {wrong[0].answer[:80]!r}; expected final answers that math-verify can read"
            )

    def _ask(self, problem: MathProblem) -> Prompt:
        system = (Message(role="system", content=self._system_prompt),) if self._system_prompt is not None else ()
        question = Message(role="user", content=problem.text)
        return Prompt(messages=(*system, question), answer=problem.answer, metadata={"source": problem.source})

    def _without_held_out(self, problems: list[MathProblem], prompts_file: str) -> list[MathProblem]:
        held_out = {problem.text for problem in self._evaluation}
        training = [problem for problem in problems if problem.text not in held_out]
        if not training:
            raise ValueError(f"MathJsonl: every problem in prompts_file {prompts_file!r} is also in evaluation_file")
        if len(training) < len(problems):
            num_left_out = len(problems) - len(training)
            logger.warning("%d of %d problems in %s are held out", num_left_out, len(problems), prompts_file)
        return training


def math_verified(
    prompt: Prompt, completion: str, *, require_boxed: bool = True, scoring_timeout_s: float = 5.0
) -> float:
    """Returns `MathJsonl`'s reward for prompts of any environment: 1 if math-verify finds the completion's answer equal
    to `prompt.answer`, else 0."""
    return _is_right(_shared_scorer(scoring_timeout_s), prompt, completion, require_boxed)


math_verified.reward_threads = 1  # type: ignore[attr-defined]


def _is_right(scorer: "_Scorer", prompt: Prompt, completion: str, require_boxed: bool) -> float:
    # The last of several boxes counts; math-verify would read them as one set.
    _, boxed, final = completion.rpartition("\\boxed")
    return float((bool(boxed) or not require_boxed) and scorer.is_correct(prompt.answer, boxed + final))


@functools.cache
def _shared_scorer(timeout_s: float) -> "_Scorer":
    return _Scorer(timeout_s)


def _read_problems(file: str, problem_field: str, answer_field: str) -> list[MathProblem]:
    problems = []
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"MathJsonl: cannot read {file!r}, expected a UTF-8 file of JSON objects: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            record = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"MathJsonl: {where}: {line[:80]!r} is no JSON, expected an object: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"MathJsonl: {where}: {line[:80]!r}, expected an object")
        text, answer = _field(record, problem_field, where), _field(record, answer_field, where)
        problems.append(MathProblem(text=text, answer=_final(answer, f"{where}: field {answer_field!r}"), source=where))
    if not problems:
        raise ValueError(f"MathJsonl: {file!r} holds no problem, expected one JSON object a line")
    return problems


def _final(answer: str, field: str) -> str:
    """Returns the final answer in the answer field; `field` names it in errors."""
    _, mark, final = answer.rpartition("####")
    final = final.strip()
    if mark and not final:
        raise ValueError(f"MathJsonl: {field}: nothing follows the '####' of {answer[-80:]!r}, expected an answer")
    if "\\boxed" in final or _PLAIN.fullmatch(final):
        return final
    several, plain = "\n" in final and "\\begin" not in final, _NO_WORDS.sub(" ", final)
    if several or _SENTENCE.search(plain) or len(_WORD.findall(plain)) > _MOST_WORDS:
        raise ValueError(
            f"MathJsonl: {field} is {final[:80]!r}, which {'has several lines' if several else 'is a sentence'}; "
            "expected the final answer alone, in a \\boxed{} or behind '####', its words in a \\text{}"
        )
    return final


def _boxed(answer: str) -> str:
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _field(record: dict[str, object], name: str, where: str) -> str:
    if name not in record:
        raise ValueError(f"MathJsonl: {where}: field {name!r} is missing, found {sorted(record)}")
    value = record[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"MathJsonl: {where}: field {name!r} is {value!r}, expected a string that is not empty")
    return value


class _Scorer:
    """math-verify in a process of its own.

    Its own timeout is a signal, which works only in a main thread and cannot interrupt one long multiplication such as
    `9^{9^{9^9}}`. Here the process is killed, and the next call starts another. Calls from several threads take turns.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def is_correct(self, answer: str, completion: str) -> bool:
        with self._turn:
            if self._process is None or not self._process.is_alive():
                self._start()
            assert self._pipe is not None
            try:
                self._pipe.send((answer, completion))
                if self._pipe.poll(self._timeout_s):
                    return self._pipe.recv()
                logger.warning("scoring an answer took more than %s s, counted as wrong: %r", self._timeout_s, answer)
            except (EOFError, OSError):
                logger.warning("the scoring process ended over an answer, counted as wrong: %r", answer)
            self.stop()
            return False

    def _start(self) -> None:
        # Spawned, not forked: a fork would copy the producer's running threads and engine.
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_score_forever, args=(far_end,), name="math-verify", daemon=True)
        self._process.start()
        far_end.close()
        if not self._pipe.poll(_STARTUP_TIMEOUT_S):
            self.stop()
            raise RuntimeError(f"MathJsonl: the scoring process did not start within {_STARTUP_TIMEOUT_S} s")
        self._pipe.recv()

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self._process is None or self._pipe is None:
            return
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._process = None


def _score_forever(pipe: Connection) -> None:
    """Receives (answer, completion) and sends whether they agree, until the other end closes."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # A keyboard interrupt reaches the whole process group; the producer's shutdown ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    boxed_first = LatexExtractionConfig(boxed_match_priority=0)
    pipe.send("ready")
    while True:
        try:
            answer, completion = pipe.recv()
        except EOFError:
            return
        # math-verify's own alarms are off: the parent keeps the time.
        gold = parse(_boxed(answer), [boxed_first], parsing_timeout=None)
        guess = parse(completion, [boxed_first, ExprExtractionConfig()], parsing_timeout=None)
        pipe.send(bool(verify(gold, guess, timeout_seconds=None)))
