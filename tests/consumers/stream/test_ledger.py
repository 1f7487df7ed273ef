"""The ledger holds every index once, as ranges."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consumers.checkpoints.state import LedgerState
from penstock.consumers.stream.ledger import IndexRanges, Ledger


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


@given(st.sets(st.integers(1, 40)), st.lists(st.integers(1, 40)))
def test_what_is_discarded_is_gone_and_the_rest_stays(indexes, discarded):
    ranges = IndexRanges()
    for index in indexes:
        ranges.add(index)
    for index in discarded:
        assert ranges.discard(index) == (index in indexes)
        indexes.discard(index)
    assert list(ranges) == sorted(indexes) and len(ranges) == len(indexes)
    assert list(IndexRanges(ranges.ranges())) == sorted(indexes)
    assert all(start < end for start, end in ranges.ranges())


def test_ranges_that_overlap_or_do_not_ascend_are_refused():
    for runs in ([(3, 3)], [(1, 3), (3, 5)], [(5, 6), (1, 2)]):
        with pytest.raises(ValueError, match="expected ascending, disjoint, half-open ranges"):
            IndexRanges(runs)


def test_a_ledger_survives_its_checkpoint():
    ledger = Ledger()
    ledger.num_released = 9
    for index, outcome in enumerate(["trained", "skipped", "dead", "trained"], 1):
        ledger.settle(index, outcome, "reward: division by zero")
    ledger.released_again["stale"] += 2
    ledger.num_duplicates_dropped = 3
    ledger.postponed[7] = "stale"
    again = Ledger.from_state(msgspec.json.decode(msgspec.json.encode(ledger.to_state()), type=LedgerState))
    assert ledger.to_state().postponed == [7] and not again.postponed, "a resume finds what is nowhere by itself"
    assert again.to_state() == msgspec.structs.replace(ledger.to_state(), postponed=[])
    assert list(again.settled) == [1, 2, 3, 4]
    assert again.num_open == 5
    assert again.dead_reasons == {"reward": 1}


def dead_ledger() -> Ledger:
    ledger = Ledger()
    ledger.num_released = 5
    for index, reason in ((1, "lag"), (2, "poison: x"), (3, "poison: y")):
        ledger.settle(index, "dead", reason)
    ledger.settle(4, "trained")
    return ledger


def test_a_dead_index_opened_again_is_off_the_books_until_it_is_settled_anew():
    ledger = dead_ledger()
    ledger.reopen(2, "7-0", "9-3")
    assert list(ledger.settled) == [1, 3, 4] and ledger.num_open == 2
    assert ledger.dead_reasons == {"lag": 1, "poison": 1}
    ledger.settle(2, "trained")
    ledger.reopen(1, "8-0", "9-4")
    assert ledger.dead_reasons == {"poison": 1}, "a reason that nobody is dead of is none"
    assert list(ledger.by_outcome["trained"]) == [2, 4]


def test_no_index_is_settled_twice_only_a_dead_one_is_opened_again_and_once_by_each_letter():
    ledger = dead_ledger()
    with pytest.raises(ValueError, match="index 4 is settled already; it cannot also be dead"):
        ledger.settle(4, "dead", "reward: boom")
    for index in (4, 5):
        with pytest.raises(ValueError, match=f"index {index} is not dead; it cannot be opened again"):
            ledger.reopen(index, "7-0", "9-3")
    assert ledger.may_reopen(2, "7-0") and not ledger.may_reopen(4, "7-0")
    ledger.reopen(2, "7-0", "9-3")
    assert not ledger.may_reopen(2, "7-0") and not ledger.may_reopen(2, "8-0"), "it is open already"
    ledger.settle(2, "dead", "poison: z")
    again = Ledger.from_state(msgspec.json.decode(msgspec.json.encode(ledger.to_state()), type=LedgerState))
    assert again.requeued == ledger.requeued
    assert not again.may_reopen(2, "7-0") and again.may_reopen(2, "8-0")
