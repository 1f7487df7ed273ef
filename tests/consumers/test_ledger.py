"""The books hold every index once, as ranges."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.ledger import IndexRanges, Ledger


@given(st.lists(st.integers(1, 60)))
def test_index_ranges_behave_like_a_set(indexes):
    ranges, model = IndexRanges(), set()
    for index in indexes:
        assert ranges.add(index) == (index not in model)
        model.add(index)
    assert sorted(model) == list(ranges)
    assert len(ranges) == len(model)
    assert [i for i in range(70) if i in ranges] == sorted(model)
    assert list(ranges.missing(65)) == [i for i in range(1, 66) if i not in model]
    assert ranges.highest == max(model, default=0)
    runs = ranges.ranges()
    assert all(end < start for (_, end), (start, _) in pairwise(runs)), "runs that touch are merged"
    assert list(IndexRanges(runs)) == sorted(model)


def test_a_million_consecutive_indexes_are_one_range():
    ranges = IndexRanges()
    for index in range(1_000_000, 0, -1):
        ranges.add(index)
    assert ranges.ranges() == [(1, 1_000_001)]


@pytest.mark.parametrize("runs", [[(3, 3)], [(1, 3), (3, 5)], [(5, 6), (1, 2)]])
def test_ranges_that_overlap_or_do_not_ascend_are_refused(runs):
    with pytest.raises(ValueError, match="expected ascending, disjoint, half-open ranges"):
        IndexRanges(runs)


def test_an_index_cannot_be_settled_twice():
    ledger = Ledger()
    ledger.settle(4, "trained")
    with pytest.raises(ValueError, match="index 4 is settled already; it cannot also be dead"):
        ledger.settle(4, "dead", "reward: boom")


def test_books_survive_json():
    ledger = Ledger()
    ledger.num_released = 9
    for index, outcome in enumerate(["trained", "skipped", "dead", "trained"], 1):
        ledger.settle(index, outcome, "reward: division by zero")
    ledger.released_again["stale"] += 2
    ledger.num_duplicates_dropped = 3
    again = Ledger.from_state(json.loads(json.dumps(ledger.to_state())))
    assert again.to_state() == ledger.to_state()
    assert list(again.settled) == [1, 2, 3, 4]
    assert again.num_open == 5
    assert again.dead_reasons == {"reward": 1}
