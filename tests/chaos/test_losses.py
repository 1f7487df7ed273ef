"""The fault suite's double-entry count of tokens: what it detects, and what it accepts."""

import pytest

from penstock.deploy.demo.char_tokenizer import build_tokenizer
from tests.chaos.environment import text_of
from tests.chaos.losses import Loss, balance, by_outcome, compare
from tests.chaos.tally import Request, Tally, mark_of, parts_of, requests_in, tokens_in

LIMIT = 10
SAMPLED = {0: {1: 100, 2: 50}, 1: {1: 60, 2: 150}}
"""Process 0 was killed in groups 1 and 2, and process 1 continued them."""


def trained(*counts: tuple[int, int, int]) -> dict[tuple[int, int], int]:
    """The trained tokens, given as (index, process, tokens)."""
    return {(index, mark_of(number)): count for index, number, count in counts}


def test_what_a_killed_process_has_sampled_and_is_not_trained_was_lost() -> None:
    tokens = trained((1, 0, 92), (2, 0, 50), (1, 1, 60), (2, 1, 150))
    losses, problems = compare(SAMPLED, {0: "SIGKILL"}, tokens, LIMIT)
    assert problems == []
    assert losses == [Loss(kind="SIGKILL", num_groups=1, num_sampled=100, num_lost=8, most_lost=8)]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (trained((1, 0, 89), (2, 0, 50), (1, 1, 60), (2, 1, 150)), "11 of 100 tokens were lost with process 0"),
        (trained((1, 0, 100), (2, 0, 50), (1, 1, 60), (2, 1, 149)), "1 of 150 tokens of process 1 (lived on)"),
        (trained((1, 0, 100), (2, 0, 51), (1, 1, 60), (2, 1, 150)), "-1 of 50 tokens of process 0 (SIGKILL)"),
    ],
    ids=["more than the bound", "of one that lives", "trained and never sampled"],
)
def test_any_other_difference_is_a_problem(tokens, problem: str) -> None:
    _, (found,) = compare(SAMPLED, {0: "SIGKILL"}, tokens, LIMIT)
    assert problem in found


def test_groups_that_are_not_trained_are_left_to_the_balance() -> None:
    losses, problems = compare(SAMPLED, {0: "SIGKILL"}, trained((1, 0, 92), (1, 1, 60)), LIMIT)
    assert problems == [] and losses[0].num_lost == 8


@pytest.mark.parametrize(
    ("dead", "is_balanced"),
    [(200, True), (190, True), (189, False), (201, False)],
)
def test_what_was_sampled_is_lost_or_counted(dead: int, is_balanced: bool) -> None:
    counted = {"trained": 152, "dead": dead}
    found = balance(SAMPLED, {0}, {1}, 8, counted, LIMIT)
    assert (found == []) == is_balanced


def test_counts_are_added_up_over_environments_and_lengths() -> None:
    one = {"num": 2, "num_tokens": 30}
    attrition = {"a": {"trained": {"16": one, "32": one}}, "b": {"trained": {"16": one}, "dead": {"unknown": one}}}
    assert by_outcome(attrition, "num_tokens") == {"trained": 90, "dead": 30}


def test_a_tally_says_what_was_sampled_for_whom_while_it_is_written(tmp_path) -> None:
    encode = build_tokenizer(64).encode
    tally, file = Tally(tmp_path / "tallies", 7), tmp_path / "tallies" / "7"
    assert requests_in(file) == []
    tally.begin("a", 5, 2, 40)
    tally.begin("b", -1, 1, 40)
    tally.begin("c", 5, 1, 40)
    for request_id, num in (("c", 3), ("a", 1), ("a", 2), ("b", 9)):
        tally.step(request_id, num)
    assert requests_in(file) == [Request(5, 2, 2, 40), Request(-1, 1, 9, 40), Request(5, 1, 3, 40)]
    assert tokens_in(file) == {5: 7}, "held-out prompts are no part of it"
    assert parts_of(encode(text_of(123)) + [tally.mark] * 9) == (123, 9)
