"""Final answers as GSM8K, MATH and AIME write them, and as models do."""

import time
from pathlib import Path

from penstock.producers.environments.answers import same_answer, words
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


def test_what_only_looks_like_numbers_is_left_to_algebra() -> None:
    many = "0.\\overline{" + "3" * 4400 + "}"
    for gold, guess in (
        ("3:2", "3.1.4:2"),
        ("3:30 pm", "3.30.00 pm"),
        ("7 to 9", "7...9 to 9"),
        ("2", many),
        (many, "2"),
    ):
        assert same_answer(gold, guess) is None, guess
    assert same_answer("3:2", "6:4") and same_answer("3:30 pm", "15:30")


def test_a_guess_of_very_many_characters_is_not_compared() -> None:
    began = time.process_time()
    assert same_answer("5", "1" * 100_000) is same_answer("5", "1" + " " * 100_000 + "x") is None
    assert time.process_time() - began < 1.0


def test_words_are_compared_as_words() -> None:
    """math-verify multiplies letters: `live` would equal `evil`."""
    assert words("Monday.") == words(r"\text{monday}") == "monday" and words("evil") != words("live")
    assert [words(text) for text in ("xy", "E", "(B)", "x = many", "24 clips", r"\sin x")] == [""] * 6
