"""Answers that came too late give later ones more time, for a while."""

import pytest
from penstock.producers.stream import adaptive_timeout as module
from penstock.producers.stream.adaptive_timeout import FORGET_S, AdaptiveTimeout


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_command_that_was_given_up_gets_twice_the_time_and_others_in_proportion(clock: Clock) -> None:
    patience = AdaptiveTimeout(longest_s=600)
    assert patience.limit_s(10) == 10
    patience.exceeded(10, 10)
    assert patience.limit_s(10) == 20
    patience.exceeded(30, 60)
    assert (patience.limit_s(10), patience.limit_s(30)) == (40, 120)


def test_many_that_are_given_up_at_once_count_as_one(clock: Clock) -> None:
    patience = AdaptiveTimeout(longest_s=600)
    for _ in range(5):
        patience.exceeded(10, 10)
    assert patience.limit_s(10) == 20


def test_none_gets_more_than_the_longest_unless_it_does_so_usually(clock: Clock) -> None:
    patience = AdaptiveTimeout(longest_s=15)
    patience.exceeded(10, 10)
    assert (patience.limit_s(10), patience.limit_s(25)) == (15, 25)


def test_it_is_forgotten_once_none_has_needed_it_for_a_while(clock: Clock) -> None:
    patience = AdaptiveTimeout(longest_s=600)
    patience.exceeded(10, 10)
    clock.now += FORGET_S - 1
    patience.answered(10, 12)
    clock.now += FORGET_S - 1
    patience.answered(10, 3)
    assert patience.limit_s(10) == 20
    clock.now += 2
    assert patience.limit_s(10) == 10
