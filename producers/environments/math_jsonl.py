"""Mathematical problems from a JSONL file, asked through the chat template and scored by math-verify."""

import functools
import logging
import math
import re
from collections.abc import Callable

from penstock.producers.environments.answers import same_answer
from penstock.producers.environments.dataset import Dataset, task_of, unlike
from penstock.producers.environments.quantities import as_latex, quantities, visible
from penstock.producers.environments.rows import Row
from penstock.producers.environments.scoring_process import ScoringProcess
from penstock.schemas.prompt import Prompt, Reward

logger = logging.getLogger(__name__)

MOST_CHECKED = 256
_NO_WORDS = re.compile(r"\\(text\w*|mbox|mathrm|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
"""Matches words that LaTeX marks as text, and its commands."""
_WORD = re.compile(r"[A-Za-z]{2,}")
_EMPTY = re.compile(r"\\(?:text\w*|math\w+|mbox|operatorname|[lcv]?dots|q?quad|square|phantom|left|right)\b|[\W_]")
"""Matches what a box without an answer may hold; `\\{\\}` and the like are compared as they are."""
_SENTENCE = re.compile(r"\b(is|are|was|were|be|has|have|had|it|he|she|they|we|you|answer|therefore)\b", re.IGNORECASE)
_MOST_WORDS = 3
"""Of an answer, as in `60 miles per hour`. math-verify accepts more words too, as a product of letters."""
_SIGNS = ("\u221e", "\u2205", "\\{")
"""In answers without a letter or a digit: infinity, the empty set."""


class MathJsonl(Dataset):
    """A `Dataset` of problems and their final answers: `{"problem": "What is 1/2+1/4?", "answer": "3/4"}`. In a worked
    solution that ends in `#### 22`, like GSM8K's, the answer is what follows the mark; so it is in a completion without
    a box.

    An answer that is a sentence is refused: one with more than `_MOST_WORDS` words, or a verb or pronoun, outside
    `\\text{}`. So is one that is not equal to itself by math-verify when the files are opened. Numbers and plain
    fractions always are; of other answers at most `MOST_CHECKED` are checked, spread over the file.

    prompts_file, evaluation_file: `training` and `evaluation` of `Dataset`. A training problem with the text of a
        held-out one is left out of training.
    system_prompt: a message before every problem; it should say in which form to answer.
    problem_field, answer_field: the names that hold the two strings (an answer may also be a number).
    num_evaluation_prompts: how many of the evaluation file's problems to use, from the first line on; None means all.
    require_boxed: only a completion with an answer inside a `\\boxed{}` can be correct. If False, math-verify looks for
        one.
    scoring_timeout_s: an answer that takes longer to compare is worth 0.

    The reward is 1 if the completion's answer equals the file's, else 0. Numbers are compared exactly, whatever units
    are written behind them (see `penstock.producers.environments.quantities`), anything else by math-verify.
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
        columns = {"prompt": problem_field, "answer": answer_field}
        super().__init__(
            seed=seed,
            training=prompts_file,
            evaluation=evaluation_file,
            columns=columns,
            system_prompt=system_prompt,
            num_evaluation_prompts=num_evaluation_prompts,
        )
        self._order_seed = seed
        held_out = [self.evaluation_prompt(n) for n in range(1, self.num_evaluation_prompts + 1)]
        problems = [self._pose(self._rows, n) for n in range(len(self._rows))]
        texts = {prompt.messages for prompt in held_out}
        self._numbers = [n for n, prompt in enumerate(problems) if prompt.messages not in texts]
        """Of the rows that are trained on."""
        self.num_tasks = len(self._numbers)
        if not self._numbers:
            raise ValueError(f"MathJsonl: every problem in prompts_file {prompts_file!r} is also in evaluation_file")
        if num_left_out := len(problems) - len(self._numbers):
            logger.warning("%d of %d problems in %s are held out", num_left_out, len(problems), prompts_file)
        self._require_boxed = require_boxed
        self._scorer = _scorer(scoring_timeout_s)
        for prompts in ([problems[n] for n in self._numbers], held_out):
            self._check_answers(prompts)
        self._scorer.stop()  # the first reward starts it again: not everyone who opens the files asks for one

    def prompt(self, index: int) -> Prompt:
        return self._pose(self._rows, self._numbers[task_of(index, len(self._numbers), self._order_seed)])

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        correct = _is_right(self._scorer, prompt, completion, self._require_boxed)
        return Reward(value=correct, parts={"correct": correct})

    def _answer(self, row: Row, place: str) -> str:
        answer, column = super()._answer(row, place), self._columns["answer"]
        if isinstance(row[column], bool) or not answer.strip():
            raise unlike(row[column], column, place, "a string that is not empty, or a number")
        return _final(answer, f"{place}: column {column!r}")

    def _check_answers(self, prompts: list[Prompt]) -> None:
        odd = list({prompt.answer: prompt for prompt in prompts if not quantities(prompt.answer)}.values())
        checked = odd[:: max(1, math.ceil(len(odd) / MOST_CHECKED))]
        wrong = [each for each in checked if not _verified(self._scorer, each.answer, each.answer)]
        if wrong:
            raise ValueError(
                f"MathJsonl: {len(wrong)} of {len(checked)} answers are not right by their own measure, first "
                f"{wrong[0].metadata['source']}: {wrong[0].answer[:80]!r}; expected final answers that math-verify can "
                "read"
            )


def math_verified(
    prompt: Prompt, completion: str, *, require_boxed: bool = True, scoring_timeout_s: float = 5.0
) -> float:
    """Returns `MathJsonl`'s reward for prompts of any environment: 1 if the completion's answer equals `prompt.answer`,
    or what follows a `####` in it, else 0."""
    return _is_right(_shared_scorer(scoring_timeout_s), prompt, completion, require_boxed)


math_verified.reward_threads = 1  # type: ignore[attr-defined]


def _is_right(scorer: ScoringProcess, prompt: Prompt, completion: str, require_boxed: bool) -> float:
    gold = prompt.answer.rpartition("####")[2].strip()
    gold = _box(gold) or gold
    box = _box(completion)
    if require_boxed and not box:
        return 0.0
    guess = (box or completion).rpartition("####")[2].strip()
    decided = same_answer(gold, guess)
    if decided is None:
        decided = _verified(scorer, gold, guess, is_boxed=bool(box))
    return float(decided)


def _verified(scorer: ScoringProcess, gold: str, guess: str, is_boxed: bool = True) -> bool:
    text = as_latex(guess)
    return scorer.value(as_latex(gold), _boxed(text) if is_boxed else text) == 1.0


def _box(text: str) -> str:
    """Returns what is in the last `\\boxed{}`, whose braces are balanced; empty without one, and for one without an
    answer. math-verify would read what follows a box too, and several boxes as one set."""
    _, box, rest = text.rpartition("\\boxed")
    if not box or not rest.lstrip().startswith("{"):
        return ""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            inside = visible(rest[rest.index("{") + 1 : brace.start()]).strip()
            return inside if _EMPTY.sub("", inside) or any(sign in inside for sign in _SIGNS) else ""
    return ""


_shared_scorer = functools.cache(lambda timeout_s: _scorer(timeout_s))


def _final(answer: str, field: str) -> str:
    """Returns the final answer in the answer field; `field` names it in errors."""
    _, mark, final = answer.rpartition("####")
    final = final.strip()
    if mark and not final:
        raise ValueError(f"{field}: nothing follows the '####' of {answer[-80:]!r}, expected an answer")
    if "\\boxed" in final or any(not each.unit for each in quantities(final)):
        return final
    several, plain = "\n" in final and "\\begin" not in final, _NO_WORDS.sub(" ", final)
    if several or _SENTENCE.search(plain) or len(_WORD.findall(plain)) > _MOST_WORDS:
        raise ValueError(
            f"{field} is {final[:80]!r}, which {'has several lines' if several else 'is a sentence'}; "
            "expected the final answer alone, in a \\boxed{} or behind '####', its words in a \\text{}"
        )
    return final


def _boxed(answer: str) -> str:
    return answer if "\\boxed" in answer else f"\\boxed{{{answer}}}"


def _scorer(timeout_s: float) -> ScoringProcess:
    return ScoringProcess("MathJsonl", _math_verify, timeout_s=timeout_s)


def _math_verify() -> Callable[[str, str], float]:
    """Returns what says whether an answer and a completion agree."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    boxed_first = LatexExtractionConfig(boxed_match_priority=0)

    def agree(answer: str, completion: str) -> float:
        # math-verify's own alarms are off: the scoring process is timed from outside.
        gold = parse(_boxed(answer), [boxed_first], parsing_timeout=None)
        guess = parse(completion, [boxed_first, ExprExtractionConfig()], parsing_timeout=None)
        return float(bool(verify(gold, guess, timeout_seconds=None)))

    return agree
