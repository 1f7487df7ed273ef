import json
import re
import threading
from pathlib import Path

import pytest

from penstock.producers.environments.math_jsonl import MOST_CHECKED, MathJsonl
from penstock.producers.environments.scoring_process import ScoringProcess
from penstock.schemas.prompt import Prompt

EMPTY_BOXES = (
    "\\boxed{} 5", "\\boxed{...} = 5", "\\boxed{-} 5", "\\boxed{\\text{}} 5", "\\boxed{?} 5", "\\boxed{\\ldots} 5",
    "\\boxed{ \\quad } 5", "\\boxed{___}5", "\\boxed 5", "\\boxed{5", "5 \\boxed{}", "\\boxed{5} or \\boxed{}",
)  # fmt: skip
"""None holds an answer."""
PROBLEMS = [{"problem": f"What is ${n}/2$?", "answer": f"\\frac{{{n}}}{{2}}"} for n in range(1, 8)]


def write(path: Path, records: list) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    return write(tmp_path / "train.jsonl", PROBLEMS)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> MathJsonl:
    """One environment for all scoring tests: its scoring process takes a second to start."""
    file = write(tmp_path_factory.mktemp("scored") / "train.jsonl", PROBLEMS)
    return MathJsonl(seed=0, prompts_file=file, scoring_timeout_s=30.0)


def test_held_out_problems_are_left_out_of_training_whose_epochs_have_each_other_once(
    tmp_path: Path, prompts_file: str
):
    held_out = write(tmp_path / "test.jsonl", [*PROBLEMS[:2], {"problem": "new", "answer": "1"}])
    environment = MathJsonl(seed=0, prompts_file=prompts_file, evaluation_file=held_out)
    limited = MathJsonl(seed=0, prompts_file=prompts_file, evaluation_file=held_out, num_evaluation_prompts=2)
    assert (environment.num_evaluation_prompts, limited.num_evaluation_prompts) == (3, 2)
    evaluation = {environment.evaluation_prompt(n).messages for n in (1, 2, 3)}
    other = MathJsonl(seed=5, prompts_file=prompts_file, evaluation_file=held_out)
    epochs = [[environment.prompt(5 * epoch + n).messages for n in range(1, 6)] for epoch in range(3)]
    epochs.append([other.prompt(n).messages for n in range(1, 6)])
    assert [len(set(epoch)) for epoch in epochs] == [5] * 4 and len(set(map(tuple, epochs))) == 4
    assert all(evaluation.isdisjoint(epoch) for epoch in epochs)
    with pytest.raises(ValueError, match="every problem in prompts_file"):
        MathJsonl(seed=0, prompts_file=prompts_file, evaluation_file=prompts_file)


def test_answers_are_compared_as_mathematics(scored: MathJsonl):
    for answer, completion, value in [
        ("\\frac{1}{2}", "Half of one is \\boxed{0.5}.", 1.0),
        ("$\\frac12$", "\\boxed{\\frac{2}{4}}", 1.0),
        ("x^2+1", "\\boxed{1 + x^2}", 1.0),
        ("3", "\\boxed{2}, no: \\boxed{3}", 1.0),
        ("2", "\\boxed{2}, no: \\boxed{3}", 0.0),
        ("7", "the answer is 7", 0.0),
        ("7", "\\boxed{", 0.0),
        ("7", "\\boxed{}", 0.0),
        *(("5", box, 0.0) for box in EMPTY_BOXES),
        ("5e-05", "\\boxed{0.00005}", 1.0),
        ("5e-05", "\\boxed{8.59}", 0.0),
        ("1000", "\\boxed{1e3}", 1.0),
        ("60 miles per hour", "\\boxed{60\\text{ miles per hour}}", 1.0),
        ("60 miles per hour", "\\boxed{30 + 30}", 1.0),
        ("x^2", "\\boxed{x^2} = 4", 1.0),
        ("\\frac{1}{2}", "\\boxed{\\boxed{\\frac{1}{2}}}", 1.0),
        ("20%", "\\boxed{0.2}", 1.0),
        ("60 miles per hour", "\\boxed{v = 60\\text{ mph}}", 1.0),
        ("0.33", "\\boxed{x \\approx 0.33}", 1.0),
        ("7", "\\boxed{x = 5 \\text{ or } x = 7}", 0.0),
        ("5 m", "\\boxed{5\\text{ m}}", 1.0),
        ("24 + 48 = 72\n#### 72", "\\boxed{24 + 48 = 72\n#### 72}", 1.0),
        ("inf", "\\boxed{\\infty}", 1.0),
        ("evil", "\\boxed{live}", 0.0),
        ("\\text{no solution}", "\\boxed{No solution}", 1.0),
        ("She sold 24.\n#### 1,072", "\\boxed{1072}", 1.0),
        ("7", "", 0.0),
    ]:
        reward = scored.reward(Prompt(text="?", answer=answer), completion)
        assert (reward.value, reward.parts) == (value, {"correct": value}), completion


def test_an_answer_without_a_box_can_be_allowed(prompts_file: str):
    environment = MathJsonl(seed=0, prompts_file=prompts_file, require_boxed=False, scoring_timeout_s=30.0)
    for completion in ("so the answer is 7", "3 + 4 = 7\n#### 7", "7 dollars", "\\boxed{7}", "\\boxed{} 7"):
        assert environment.reward(Prompt(text="?", answer="7"), completion).value == 1.0, completion
    assert environment.reward(Prompt(text="?", answer="7"), "3 + 4 = 7\n#### 8").value == 0.0


def test_rewards_can_be_asked_for_from_several_threads(scored: MathJsonl):
    values: dict[int, float] = {}

    def score(n: int) -> None:
        values[n] = scored.reward(Prompt(text="?", answer=str(n % 2)), "\\boxed{1}").value

    threads = [threading.Thread(target=score, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == {n: float(n % 2) for n in range(8)}


def test_an_answer_that_never_finishes_is_wrong_and_the_next_one_is_scored(prompts_file: str):
    environment = MathJsonl(seed=0, prompts_file=prompts_file, scoring_timeout_s=0.5)
    prompt = Prompt(text="?", answer="7")
    assert environment.reward(prompt, "\\boxed{9^{9^{9^{9}}}}").value == 0.0
    environment._scorer._timeout_s = 60.0  # a busy machine takes its time to start another process
    assert environment.reward(prompt, "\\boxed{7}").value == 1.0


def test_raw_gsm8k_is_taken_as_it_is(tmp_path: Path):
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether <<48+24=72>>72.\n#### 1,072"
    file = write(tmp_path / "gsm8k.jsonl", [{"question": "How many clips?", "answer": solution}])
    prompt = MathJsonl(seed=0, prompts_file=file, problem_field="question", system_prompt="Be brief.").prompt(1)
    assert prompt.answer == "1,072"
    assert [message.content for message in prompt.messages] == ["Be brief.", "How many clips?"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "She sold 24.\nThen 48.",
            "train.jsonl:2: column 'answer' is 'She sold 24.*several lines; expected the final answer",
        ),
        ("", "train.jsonl:2: column 'answer' is '', expected a string that is not empty, or a number"),
        (True, "train.jsonl:2: column 'answer' is True, expected a string that is not empty, or a number"),
        ("She sold 24.\n#### ", "train.jsonl:2: column 'answer': nothing follows the '####' of"),
        ("}", "1 of 2 answers are not right by their own measure, first .*train.jsonl:2: '}'; expected final answers"),
    ],
)
def test_an_answer_that_no_completion_could_match_is_refused_with_its_line(
    tmp_path: Path, answer: object, message: str
):
    records = [{"problem": "a", "answer": "x^2"}, {"problem": "b", "answer": answer}, {"problem": "c", "answer": "3"}]
    with pytest.raises(ValueError, match=message):
        MathJsonl(seed=0, prompts_file=write(tmp_path / "train.jsonl", records))


def test_a_sentence_is_no_answer(tmp_path: Path):
    for answer in (
        "Natalia sold 48/2 = 24 clips in May.", "He has 5 dollars left", "x is 5", "The answer: 22",
        "24 clips altogether in both months", "#### She sold 24 clips.",
    ):  # fmt: skip
        records = [{"problem": "a", "solution": "#### 22"}, {"problem": "b", "solution": answer}]
        file = write(tmp_path / "train.jsonl", records)
        shown = re.escape(repr(answer.removeprefix("#### ")))
        with pytest.raises(ValueError, match=f"train.jsonl:2: column 'solution' is {shown}, which is a sentence; exp"):
            MathJsonl(seed=0, prompts_file=file, answer_field="solution")


def test_answers_as_data_sets_have_them_are_taken(tmp_path: Path):
    answers = [
        "1,072", "-\\frac{3}{4}", "\\dfrac{1}{2}", "3\\sqrt{2}", "(-\\infty, 3]", "[2,5) \\cup (7,\\infty)", "12_{7}",
        "\\text{Monday}", "\\text{It is neither of them}", "\\textbf{(B)}", "Monday", "no solution", "E", "\\text{Yes}",
        "10\\text{ square inches}", "20 \\mbox{ cm}^2", "60 miles per hour", "5 hours 30 minutes", "\\$32,\\!348",
        "90^\\circ", "11:30 a.m.", "x < 5 or x > 7", "y = 2x + 3", "\\{1, 2\\}", "1 \\pm \\sqrt{19}", "6 - 5i", "5\\%",
        "\\sin^2 x + \\cos x + \\tan x + \\cot x", "\\begin{pmatrix}\n1 \\\\ 2\n\\end{pmatrix}",
        "So the answer is \\boxed{22}.", "[0, 1e3]", "(-\u221e, 3]", "12 kg\u00b7m", "\u221a(2+x)",
    ]  # fmt: skip
    file = write(tmp_path / "train.jsonl", [{"problem": str(n), "answer": each} for n, each in enumerate(answers)])
    environment = MathJsonl(seed=0, prompts_file=file, scoring_timeout_s=30.0)
    assert {environment.prompt(n + 1).answer for n in range(len(answers))} == set(answers)


def test_of_many_answers_some_from_all_over_the_file_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(
        ScoringProcess, "value", lambda self, answer, completion: float(not asked.append((answer, completion)))
    )
    records = [{"problem": str(n), "answer": f"x^{n}" if n % 2 else str(n)} for n in range(2000)]
    MathJsonl(seed=0, prompts_file=write(tmp_path / "train.jsonl", records))
    assert 200 <= len(asked) <= MOST_CHECKED and len(set(asked)) == len(asked)
    assert asked[0] == ("x^1", "\\boxed{x^1}") and int(asked[-1][0][2:]) > 1950
