"""What became of rollouts, by length, and the test of whether long ones are lost more often."""

import math
import random

import msgspec

from attrition_totals import totals
from penstock.schemas.attrition import (
    BEYOND,
    UNKNOWN,
    WINDOW,
    Attrition,
    Rollouts,
    length_bucket,
    lost_by_length,
)
from penstock.schemas.rollout import died_of_length
from wire_examples import group_of_lengths


def test_losses_of_long_groups_raise_the_alarm_and_losses_at_random_do_not() -> None:
    draw = random.Random(3)
    lengths = [int(draw.lognormvariate(5, 1)) for _ in range(WINDOW)]
    cut = sorted(lengths)[-WINDOW // 4]
    of_long = lost_by_length((length, length >= cut and draw.random() < 0.4) for length in lengths)
    at_random = lost_by_length((length, draw.random() < 0.1) for length in lengths)
    assert of_long is not None and of_long.is_alarm and of_long.cut == cut
    assert at_random is not None and not at_random.is_alarm
    assert str(of_long).startswith(f"{of_long.num_long_lost} of the {of_long.num_long} longest groups ({cut:,} tokens")


def test_groups_of_one_length_cannot_be_told_apart() -> None:
    assert lost_by_length([(16, n < 100) for n in range(WINDOW)]) is None
    for num_longest in (200, 3):
        lengths = [(16, True)] * num_longest + [(8, False)] * (WINDOW - num_longest)
        assert lost_by_length(lengths).num_long == num_longest
    assert lost_by_length([(16, True)] * 10 + [(9, True)] * 60 + [(8, False)] * 186).num_long == 70


def test_groups_are_counted_by_environment_outcome_and_length_also_since_a_copy() -> None:
    found = Attrition()
    found.add("sums", "trained", group_of_lengths(3, 5, reward=1.0), 2, [0, 4])
    found.add("sums", "stale", group_of_lengths(300, 5), 2)
    stale = {"512": Rollouts(1, 300, 0, 1, 0.0, {"stop": 1}), "8": Rollouts(1, 5, 0, 1, 0.0, {"stop": 1})}
    trained = {"4": Rollouts(1, 3, 0, 1, 1.0, {"stop": 1}), "8": Rollouts(1, 5, 4, 1, 1.0, {"stop": 1})}
    assert found.rollouts == {"sums": {"trained": trained, "stale": stale}}
    assert found.window == [(5, False), (300, True)]
    before = found.copied()
    assert found.since(before) == {} and found.since({}) == found.rollouts
    found.add("sums", "trained", group_of_lengths(4, reward=-0.5), 1, [2])
    found.add("essays", "trained", group_of_lengths(9), 1)
    assert found.since(before) == {
        "sums": {"trained": {"4": Rollouts(1, 4, 2, 1, -0.5, {"stop": 1})}},
        "essays": {"trained": {"16": Rollouts(1, 9, 0, 1, 0.0, {"stop": 1})}},
    }


def test_a_group_that_is_mostly_masked_counts_as_lost() -> None:
    found = Attrition()
    found.add("sums", "trained", group_of_lengths(4, 4), 2, [4, 0])
    found.add("sums", "trained", group_of_lengths(4, 4), 2, [4, 1])
    assert [is_lost for _, is_lost in found.window] == [False, True]


def test_rollouts_in_no_record_are_of_unknown_length_and_a_deadline_is_longer_than_all() -> None:
    found = Attrition()
    found.add("sums", "dead", None, 4)
    found.add("sums", "dead", group_of_lengths(), 4, is_too_long=True)
    found.add("sums", "trained", group_of_lengths(9, 9, 9), 4)
    assert totals(found) == {
        "dead": {UNKNOWN: (8, 0)},
        "trained": {"16": (3, 27)},
        "missing": {UNKNOWN: (1, 0)},
    }
    assert found.window == [(BEYOND, True), (9, False)]


def test_a_sibling_is_missing_of_its_group_only_where_that_is_the_one_that_counts() -> None:
    """What an agent did not end in a group that is sampled again is no rollout that its index lacks."""
    for outcome in ("stale", "quarantined"):
        found = Attrition()
        found.add("sums", outcome, group_of_lengths(9, 9), 4)
        found.add("sums", "skipped", group_of_lengths(9, 9, 9), 4)
        assert totals(found) == {
            outcome: {"16": (2, 18), UNKNOWN: (2, 0)},
            "skipped": {"16": (3, 27)},
            "missing": {UNKNOWN: (1, 0)},
        }


def test_one_sibling_that_was_too_long_makes_its_group_a_long_one_that_was_lost() -> None:
    """Whatever became of the others: they are the shorter ones."""
    found = Attrition()
    late = group_of_lengths(9, 9, 9)
    for why in ("1 not finished after 900 s (endpoint.group_deadline_s)", "1 rollout_too_large", "1 idle for 300 s"):
        found.add("sums", "trained", msgspec.structs.replace(late, missing=why), 4)
    assert found.window == [(BEYOND, True), (BEYOND, True), (9, False)]


def test_what_died_of_its_length_is_told_from_what_died_of_other_things() -> None:
    """That a record over the limit and a deadline are told so, the tests of the writer and of episodes show."""
    for reason, is_so in [
        ("agents: no rollout of 2 finished: 2 rollout_too_large", True),
        ("record: group 7: rollouts[0].reward.value: nan, expected a finite number", False),
        ("reward: TimeoutError: not finished after 3 s", False),
        ("abandoned: nothing was heard of the agents: 2 not finished after 900 s", False),
        ("attempts: handed out 8 times without a result", False),
        ("", False),
    ]:
        assert died_of_length(reason) == is_so, reason


def test_rewards_that_are_no_numbers_are_left_out_and_tries_of_other_producers_are_counted() -> None:
    found = Attrition()
    found.add("sums", "dead", group_of_lengths(2, reward=math.nan, tries_lost=2), 1)
    (counts,) = found.rollouts["sums"]["dead"].values()
    assert (counts.num, counts.num_scored, counts.reward_sum) == (1, 0, 0.0)
    assert found.num_tries_lost == 2


def test_a_window_is_tested_when_it_is_full_and_the_next_one_begins_anew() -> None:
    found = Attrition()
    for n in range(WINDOW):
        assert found.last is None
        is_long = n % 4 == 0
        found.add("sums", "stale" if is_long else "trained", group_of_lengths(90 if is_long else 10), 1)
    assert found.last is not None and found.last.is_alarm and found.window == []


def test_lengths_are_told_by_powers_of_two() -> None:
    buckets = {0: "0", 1: "1", 2: "2", 3: "4", 64: "64", 65: "128", 1 << 17: "131072", (1 << 17) + 1: "+Inf"}
    assert {num_tokens: length_bucket(num_tokens) for num_tokens in buckets} == buckets
