"""Final answers as GSM8K, MATH and AIME write them, and as models do."""

from pathlib import Path

from penstock.producers.environments.answers import words
from penstock.producers.environments.math_jsonl import math_verified
from penstock.schemas.prompt import Prompt

TABLE = Path(__file__).parents[2] / "golden" / "answers.txt"


def test_an_answer_is_right_however_it_is_written_and_no_other_is():
    wrong, num_pairs, gold = [], 0, ""
    for line in TABLE.read_text("utf-8").splitlines()[1:]:
        if not line.startswith("  "):
            gold = line
            continue
        for answer in line[4:].split(" | "):
            reward = math_verified(Prompt(text="?", answer=gold), f"\\boxed{{{answer}}}", scoring_timeout_s=30.0)
            num_pairs += 1
            if reward != (line[2] == "="):
                wrong.append((gold, answer, reward))
    assert wrong == [] and num_pairs > 500


def test_words_are_compared_as_words() -> None:
    """math-verify multiplies letters: `live` would equal `evil`."""
    assert words("Monday.") == words(r"\text{monday}") == "monday" and words("evil") != words("live")
    assert [words(text) for text in ("xy", "E", "(B)", "x = many", "24 clips", r"\sin x")] == [""] * 6
