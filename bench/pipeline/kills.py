"""A producer killed at half of its rollouts, with progress saved and without: tokens lost, time to its groups, cost."""

from collections.abc import Iterator
from statistics import mean, median

import msgspec

from bench.result import Figure, Goal, compare

GROUPS = 4
"""In flight when the producer is killed, and on each engine whose rate is measured."""
NUM_TOKENS = 1024
"""Of each rollout: no end of sequence ends one sooner."""
NUM_LAYERS = 12
"""Of the model: 1,024 tokens take it about as long as they take a real model; the demo's takes 5 s."""


class KillJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring process does. kills: producers killed in each way; spells: pairs of them."""

    run_file: str
    runs: str
    kills: int
    spells: int
    spell_s: float


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One producer that was killed, and what came of its groups on another one.

    num_sampled: tokens that it had sampled. num_lost: those of them that are in no group. arrival_s: from the kill to
    the last of the groups.
    """

    num_sampled: int
    num_lost: int
    arrival_s: float


class Spell(msgspec.Struct, frozen=True, kw_only=True):
    """Some seconds of a producer that nothing happens to. cpu_s: processor seconds of its two processes."""

    num_tokens: int
    wall_s: float
    cpu_s: float


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """By `with` and `without` progress, the kills, and the spells of one producer."""

    progress_s: float
    kills: dict[str, list[Kill]]
    spells: dict[str, list[Spell]]


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
    reference_is = "the same producer with nothing to save, in turns"
    yield _compare_spells(
        "microseconds of processor per token of a producer that saves progress, nothing fails",
        "us",
        {name: [1e6 * each.cpu_s / each.num_tokens for each in spells] for name, spells in found.spells.items()},
        reference_is,
        Goal(at_most=1.01),
    )
    yield _compare_spells(
        "tokens/s of a producer that saves progress, nothing fails",
        "/s",
        {name: [each.num_tokens / each.wall_s for each in spells] for name, spells in found.spells.items()},
        reference_is,
        Goal(at_least=0.99),
    )


def _compare_spells(name: str, unit: str, values: dict[str, list[float]], reference_is: str, goal: Goal) -> Figure:
    ratios = [value / other for value, other in zip(values["with"], values["without"], strict=True)]
    return compare(
        name,
        unit=unit,
        measured=median(values["with"]),
        reference=median(values["without"]),
        reference_is=reference_is,
        goal=goal,
        ratio=median(ratios),
        details={"ratio_by_pair": ratios},
    )
