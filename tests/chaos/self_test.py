"""Shows that the suite can fail: the protocol is broken on purpose, and the witness must say what that does."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.chaos.campaign import campaign
from tests.chaos.judge import Verdict
from tests.chaos.leg import Leg


class Case(NamedTuple):
    """broken: what is missing; see roles.py. only, num_faults: what must then do harm. harm: what the verdict shows."""

    broken: str
    only: str
    num_faults: int
    harm: str
    shows: Callable[[Verdict], int]


CASES = (
    Case("deduplication", "producer frozen", 6, "indexes trained twice", lambda verdict: verdict.num_trained_twice),
    Case("reconciling", "Redis emptied", 2, "indexes lost", lambda verdict: verdict.num_lost),
    Case("books", "trainer killed", 2, "indexes trained twice", lambda verdict: verdict.num_trained_twice),
)


def self_test(out: Path, *, with_disk: bool) -> int:
    """Returns how many of the broken protocols went unnoticed."""
    legs = [
        Leg(seed=1, num_faults=case.num_faults, mean_gap_s=0.8, only=case.only, broken=case.broken, patience_s=6.0)
        for case in CASES
    ]
    num_missed = 0
    for case, result in zip(CASES, campaign(legs, out, with_disk=with_disk), strict=True):
        count = case.shows(result.verdict)
        num_missed += not count
        print(f"without {case.broken}: {count or 'NO'} {case.harm}")
    return num_missed
