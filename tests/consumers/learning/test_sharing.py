"""Rows shared out among ranks."""

import random

import pytest

from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.sharing import Sharing, shared_out, spread
from penstock.schemas.config import TrainerConfig
from training_groups import configuration, lag_from, random_group

CONFIG = configuration("unused", trainer=TrainerConfig(device="cpu", tokens_per_microbatch=60))


def _long_tailed(num_groups: int = 16, siblings: int = 8) -> list[list[tuple[int, int, int]]]:
    """(group, sibling, tokens), lengths geometric with mean 98 and at most 512."""
    source = random.Random(0)
    return [[(g, s, min(512, 1 + int(source.expovariate(1 / 98)))) for s in range(siblings)] for g in range(num_groups)]


def test_ranks_get_equal_cost_with_its_quadratic_share() -> None:
    groups = _long_tailed()
    for num_ranks in (2, 3, 8):
        sharing = Sharing(num_ranks, even_length=200.0)
        shares = shared_out(groups, lambda row, sharing=sharing: sharing.cost(row[2]), num_ranks)
        assert sorted(row for share in shares for row in share) == sorted(row for group in groups for row in group)
        costs = [sum(sharing.cost(row[2]) for row in share) for share in shares]
        assert max(costs) <= 1.05 * sum(costs) / num_ranks
    assert sharing.cost(200) == 400 and Sharing().cost(200) == 200


def test_siblings_stay_together_where_cost_allows_and_passes_are_even_and_keep_the_order() -> None:
    groups = [[(g, s, 10) for s in range(4)] for g in range(8)]
    shares = shared_out(groups, lambda row: row[2], 4)
    assert [sorted({row[0] for row in share}) for share in shares] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert all(share == sorted(share) for share in shares)
    assert spread([5, 1, 1, 1, 4, 4], lambda row: row, 3) == [[5, 1], [1, 1, 4], [4]]
    assert spread([7], lambda row: row, 3) == [[7], [], []]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_has_the_same_number_of_passes_and_all_tokens_are_in_one(num_ranks: int) -> None:
    groups = [random_group(index, 0) for index in range(1, 7)]
    groups[0] = random_group(1, 0, rewards=[1.0] * 4)
    alone = pack(groups, lag_from(7), CONFIG)
    shared = pack(groups, lag_from(7), CONFIG, sharing=Sharing(num_ranks, 100.0))
    parts = [shared.of_rank(rank, num_ranks) for rank in range(num_ranks)]
    for field in ("microbatches", "skipped"):
        of_ranks = [getattr(part.minibatches[0], field) for part in parts]
        assert len({len(each) for each in of_ranks}) == 1
        targets = sorted(token for each in of_ranks for m in each for token in m.targets.tolist())
        assert targets == sorted(token for m in getattr(alone.minibatches[0], field) for token in m.targets.tolist())
    assert shared.num_tokens_trained == alone.num_tokens_trained and shared.outcome == alone.outcome


def test_a_rank_without_rows_is_idle_in_every_pass() -> None:
    shared = pack([random_group(1, 0, siblings=2)], lag_from(7), CONFIG, sharing=Sharing(4, 100.0))
    of_ranks = [shared.of_rank(rank, 4).microbatches for rank in range(4)]
    assert sum(all(microbatch.is_idle for microbatch in each) for each in of_ranks) >= 2
    assert not of_ranks[0][0].is_idle
