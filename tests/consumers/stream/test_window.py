"""Batches take groups in the order of release within a window: what takes long is neither overtaken until it is stale
nor thrown away."""

import math
import random
from bisect import bisect_right
from itertools import cycle

from penstock.consumers.checkpoints.state import ReleasedTask
from penstock.consumers.stream.ledger import IndexRanges, Ledger
from penstock.consumers.stream.release import ReleaseWindow
from penstock.schemas.config import BatchConfig, EnvironmentConfig, ModelConfig, RunConfig, TrainerConfig
from played_engines import MEAN, MOST, play


def configuration(**changes) -> RunConfig:
    fields = {"num_updates": 30, "groups_per_batch": 16, "group_size": 8, "max_lag": 2} | changes
    return RunConfig(name="r", model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B"), **fields)


def ledger_of(num_released: int) -> Ledger:
    ledger = Ledger()
    for index in range(1, num_released + 1):
        ledger.release(ReleasedTask("", index))
    return ledger


def settle(ledger: Ledger, *indexes: int, outcome: str = "trained") -> None:
    for index in indexes:
        ledger.settle(index, outcome)


def test_a_group_is_passed_by_two_batches_and_then_waited_for_until_it_comes_dies_or_is_lost():
    ledger = ledger_of(24)
    window, ready = ReleaseWindow(configuration(groups_per_batch=4), ledger), set(range(2, 14))
    assert window.in_turn(ready) == [*range(2, 10)]
    settle(ledger, 2, 3, 4, 5)
    assert window.in_turn(ready - {2, 3, 4, 5}) == [6, 7, 8, 9]
    settle(ledger, 6, 7, 8, 9)
    rest = {10, 11, 12, 13}
    assert window.in_turn(rest) == [] and window.oldest_away(rest) == 1
    assert window.in_turn(rest | {1}) == [1, 10, 11, 12, 13], "it came"
    ledger.postponed[1] = "lost"
    assert window.in_turn(rest) == [10, 11, 12, 13]
    del ledger.postponed[1]
    ledger.release_again(1, "lost")
    ledger.release(ReleasedTask("", 25))
    assert window.in_turn({*range(10, 26)}) == [*range(10, 26)], "24 before it, and one that passes it"
    assert window.oldest_away(rest) == 14, "it is the last but one in turn"
    settle(ledger, 14, outcome="dead")
    assert window.oldest_away(rest) == 15


def test_a_group_that_is_skipped_while_a_batch_is_filled_passes_nobody():
    for fill, num_left in (("any", 5), ("with_variance", 8)):
        ledger = ledger_of(24)
        settle(ledger, 2, 3, 4, outcome="skipped")
        settle(ledger, 5, outcome="dead")
        window = ReleaseWindow(configuration(groups_per_batch=4, batch=BatchConfig(fill=fill)), ledger)
        assert len(window.in_turn(range(6, 24))) == num_left, fill


def test_members_above_an_index_are_counted():
    members = IndexRanges([(2, 5), (7, 8), (9, 12)])
    for index in range(14):
        assert members.num_above(index) == sum(member > index for member in members), index


def test_all_of_a_long_tail_is_trained_once_and_unmasked_however_slow_the_engines_are():
    """Geometric lengths, 20 seeds: what is trained is what was sampled, exactly, and distributed as what was drawn."""
    lengths: list[int] = []
    for seed, token_s in zip(range(20), cycle((0.003, 0.006, 0.01)), strict=False):
        config = configuration()
        played = play(config, token_s=token_s, seed=seed)
        assert played.trained == played.sampled and len(played.trained) == 30 * 16, seed
        assert not played.ledger.released_again and not played.num_masked, seed
        assert max(played.lags) <= config.oldest_lag == 4, seed
        counts = [each for _, outcome, _, each in played.ledger.attrition.counts() if outcome == "trained"]
        assert sum(each.num for each in counts) == 30 * 16 * 8, seed
        assert sum(each.reward_sum for each in counts) == 30 * 16 * 8 / 2, "that of every other sibling is 1"
        lengths += [length for siblings in played.trained.values() for length in siblings]
    lengths.sort()
    distances = [
        abs(bisect_right(lengths, length) / len(lengths) - (1 - (1 - 1 / MEAN) ** length)) for length in range(1, MOST)
    ]
    assert max(distances) < 1.63 / math.sqrt(len(lengths)), "Kolmogorov and Smirnov, at 1%"


def test_no_token_is_older_than_what_is_trained_on_whatever_the_run_and_its_engines():
    two_steps = TrainerConfig(num_minibatches=2)
    for changes, oldest in (
        ({"max_lag": 4, "trainer": two_steps}, 8),
        ({"max_lag": 5, "trainer": two_steps}, 9),
        ({"max_lag": 1, "groups_per_batch": 1}, 2),
        ({"max_lag": 8}, 16),
        ({"max_lag": 0}, 0),
        ({"mode": "synchronous"}, 0),
    ):
        config = configuration(num_updates=12, **changes)
        assert config.oldest_lag == oldest, changes
        for in_flight, token_s in ((8, 0.006), (40, 0.02), (1000, 0.02)):
            played = play(config, token_s=token_s, in_flight=in_flight)
            assert max(played.lags) <= oldest and not played.num_masked, (changes, in_flight)
            assert played.trained == played.sampled and not played.ledger.released_again, (changes, in_flight)


def test_a_straggler_of_fifty_times_the_median_delays_its_window_and_nothing_more():
    config = configuration()
    straggler, median, token_s = 100, 100, 0.003

    def lengths(index: int, draw: random.Random) -> list[int]:
        return [50 * median if index == straggler else median] * 8

    played, without = (play(config, token_s=token_s, lengths=each) for each in (lengths, lambda *_: [median] * 8))
    batch = next(batch for batch in played.batches if straggler in batch)
    passed = [index for one in played.batches[: played.batches.index(batch)] for index in one if index > straggler]
    assert 0 <= config.num_passing - len(passed) < config.groups_per_batch, "then the window waits for it"
    assert played.trained == played.sampled and not played.ledger.released_again and not played.num_masked
    assert played.total_s - without.total_s <= 50 * median * token_s


def test_what_a_policy_that_is_gone_has_sampled_is_sampled_again_where_that_policy_is_needed(caplog):
    played = play(configuration(), token_s=0.003, is_kept=lambda version: version != 3)
    again = played.ledger.released_again["stale"]
    assert again > 0 and len(played.trained) == 30 * 16
    lines = [record.getMessage() for record in caplog.records]
    assert lines and all("policies [3], which sampled them, are gone" in line for line in lines)
    assert sum(int(line.split()[0]) for line in lines) == again
