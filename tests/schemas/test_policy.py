"""Versions are never reused, and lag follows the line of policies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.policy import (
    FutureVersionError,
    UnknownVersionError,
    lag,
    make_version,
    split_version,
    steps_behind,
)

FORKS = {1: make_version(0, 50), 2: make_version(1, 20), 3: make_version(1, 10)}
ANNOUNCED = {0: make_version(0, 57), 1: make_version(1, 25), 2: make_version(2, 5)}


@given(st.integers(0, 1000), st.integers(0, 10**9 - 1))
def test_a_version_splits_into_the_epoch_and_steps_it_was_made_of(epoch, steps):
    assert split_version(make_version(epoch, steps)) == (epoch, steps)


def test_lag_is_the_number_of_steps_on_the_path():
    for version, current, expected in [
        (5, 7, 2),
        (7, 7, 0),
        (50, make_version(1, 0), 0),  # a checkpoint and its re-announcement
        (48, make_version(1, 3), 5),  # below the fork, on the line
        (57, make_version(1, 3), 10),  # the lost line: 7 back to the fork, 3 forward
        (make_version(1, 25), make_version(2, 1), 6),
        (50, make_version(2, 4), 24),
        (55, make_version(2, 4), 29),
        (make_version(2, 5), make_version(3, 2), 17),  # two lines that left epoch 1 at different steps
    ]:
        assert lag(version, current, FORKS, ANNOUNCED) == expected, (version, current)


@given(st.integers(0, 40), st.integers(0, 40))
def test_lag_on_one_line_is_the_difference(steps, more):
    held, wanted = make_version(3, steps), make_version(3, steps + more)
    assert lag(held, wanted, FORKS) == more == steps_behind(held, wanted) == -steps_behind(wanted, held)


def test_a_version_ahead_of_the_trainer_or_that_nobody_announced_is_refused():
    with pytest.raises(FutureVersionError, match="version 8 is ahead of the trainer's 7"):
        lag(8, 7, {})
    with pytest.raises(FutureVersionError):
        lag(make_version(2, 0), make_version(1, 5), FORKS)
    for version in (-1, 58, make_version(1, 26)):
        with pytest.raises(UnknownVersionError):
            lag(version, make_version(2, 3), FORKS, ANNOUNCED)
    with pytest.raises(UnknownVersionError, match="epoch 4"):
        lag(make_version(4, 1), make_version(5, 1), {5: 3})


def test_without_the_fork_table_a_later_epoch_is_far_ahead_and_an_earlier_one_is_not():
    for held, wanted in ((make_version(0, 99), make_version(1, 0)), (-1, 0)):
        assert steps_behind(held, wanted) == float("inf") and steps_behind(wanted, held) == 0
