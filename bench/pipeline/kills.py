"""A producer killed at half of its rollouts, with progress saved and without: tokens lost, time to its groups, cost."""

from collections.abc import Iterator
from statistics import mean, median

import msgspec

from bench.result import Figure, Goal, compare

GROUPS = 4
"""In flight when the producer is killed, and on each engine whose rate is measured."""
NUM_TOKENS = 1024
"""Of each rollout: no end of sequence ends one sooner."""


class KillJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring process does. rates: pairs of rates; kills: producers killed in each way."""

    run_file: str
    runs: str
    rates: int
    kills: int


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One producer that was killed, and what came of its groups on another one.

    num_sampled: tokens that it had sampled. num_lost: those of them that are in no group. arrival_s: from the kill to
    the last of the groups.
    """

    num_sampled: int
    num_lost: int
    arrival_s: float


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """By `with` and `without` progress, the kills, and tokens per second of one engine while nothing fails."""

    progress_s: float
    kills: dict[str, list[Kill]]
    tokens_per_s: dict[str, list[float]]


def kill_figures(found: Killed) -> Iterator[Figure]:
    """Lost tokens are compared as shares of what was sampled: a kill falls at a slightly different token each time."""
    with_, without = ([each.num_lost / each.num_sampled for each in found.kills[name]] for name in ("with", "without"))
    details = msgspec.to_builtins(found)
    yield compare(
        f"tokens lost with a producer killed at half of rollouts of {NUM_TOKENS:,} tokens",
        unit="%",
        measured=100 * mean(with_),
        reference=100 * mean(without),
        reference_is="producers.progress_s = 0: all that it had sampled",
        goal=Goal(at_most=0.05),
        details=details,
    )
    yield compare(
        f"seconds from the kill to the last of its {GROUPS} groups",
        unit="s",
        measured=median(each.arrival_s for each in found.kills["with"]),
        reference=median(each.arrival_s for each in found.kills["without"]),
        reference_is="producers.progress_s = 0",
    )
    pairs = list(zip(found.tokens_per_s["with"], found.tokens_per_s["without"], strict=True))
    yield compare(
        "producer tokens/s with progress saved, nothing fails",
        unit="/s",
        measured=median(rate for rate, _ in pairs),
        reference=median(rate for _, rate in pairs),
        reference_is="producers.progress_s = 0, the same engine in turns",
        goal=Goal(at_least=0.99),
        ratio=median(rate / other for rate, other in pairs),
        details={"ratio_by_pair": [rate / other for rate, other in pairs]},
    )
