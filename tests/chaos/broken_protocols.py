"""Shows that the suite can fail: breaks the protocol on purpose, and checks that the verdict shows the damage."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.chaos.campaign import campaign
from tests.chaos.judge import ChaosVerdict
from tests.chaos.leg import Leg


class Case(NamedTuple):
    """A broken protocol. broken: what is missing; see roles.py. only, num_faults: the faults that must then do damage.
    damage, shows: the damage, and its amount in the verdict."""

    broken: str
    only: str
    num_faults: int
    damage: str
    shows: Callable[[ChaosVerdict], int]
    with_ranks: bool = False
    limit_s: float = 6.0


CASES = (
    Case("reconciling", "Redis emptied", 2, "indexes lost", lambda verdict: verdict.num_lost),
    Case("ledger", "trainer killed", 2, "indexes trained twice", lambda verdict: verdict.num_trained_twice),
    Case(
        *("sharing", "producer killed", 1, "indexes trained twice", lambda verdict: verdict.num_trained_twice),
        with_ranks=True,
        limit_s=60.0,
    ),
)


NUM_SEEDS = 5
"""A fault may come where a broken protocol does no damage, such as a Redis emptied while producers hold every prompt.
Protocols without damage are tried with the next seed."""


def self_test(out: Path, *, with_disk: bool) -> int:
    """Returns the number of broken protocols that no seed detected; `out` has a folder for each seed."""
    left = list(CASES)
    for seed in range(1, NUM_SEEDS + 1):
        legs = [
            Leg(
                seed=seed,
                num_faults=case.num_faults,
                mean_gap_s=0.8,
                only=case.only,
                broken=case.broken,
                with_ranks=case.with_ranks,
                limit_s=case.limit_s,
            )
            for case in left
        ]
        harmless = []
        for case, result in zip(left, campaign(legs, out / f"seed-{seed}", with_disk=with_disk), strict=True):
            count = case.shows(result.verdict)
            print(f"without {case.broken}: {count or 'NO'} {case.damage}")
            if not count:
                harmless.append(case)
        left = harmless
        if not left:
            break
    return len(left)
