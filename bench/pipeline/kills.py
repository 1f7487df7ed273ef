"""A producer killed halfway through its rollouts, with saved progress and without: tokens lost, and time to its groups;
and the cost of saving progress for one that is not killed."""

from collections.abc import Iterator, Sequence
from statistics import mean, median

import msgspec

from bench.result import Figure, Goal, compare

GROUPS = 4
"""In flight when the producer is killed, and on one that is not."""
NUM_TOKENS = 1024
"""Of each rollout: no end of sequence ends one earlier."""
NUM_LAYERS = 12
"""Of the model: 1,024 tokens take it about as long as they take a real model; the demo's takes 5 s."""


LENGTHS = (512, 1024, 8192, 32_768)
"""Lengths of rollouts whose saving is measured without an engine, which would take too long to sample them."""


class KillJob(msgspec.Struct, frozen=True, kw_only=True):
    """The measuring process's job. kills: producers killed in each way; spells: of an undisturbed producer; length_s:
    seconds for each of `LENGTHS`."""

    run_file: str
    runs: str
    kills: int
    spells: int
    spell_s: float
    length_s: float


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One producer that was killed, and what became of its groups on another one.

    num_sampled: tokens that it had sampled. num_lost: those of them that are in no group. arrival_s: from the kill to
    the last of the groups.
    """

    num_sampled: int
    num_lost: int
    arrival_s: float


class Spell(msgspec.Struct, frozen=True):
    """Some seconds of an undisturbed producer.

    cpu_s: processor seconds of its processes. saving_s: of saving progress. sockets_s: of the loop for all connections
    to Redis, which may be for saving. num_saves: also those that found nothing new. num_bytes: written.
    """

    wall_s: float
    cpu_s: float
    saving_s: float
    sockets_s: float
    num_saves: float
    num_bytes: float


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """kills: by `with` and `without` progress. spells: of one producer that samples. lengths: one spell each of one
    whose rollouts are about so many tokens long."""

    progress_s: float
    num_rollouts: int
    kills: dict[str, list[Kill]]
    spells: list[Spell]
    lengths: dict[int, Spell]


def kill_figures(found: Killed) -> Iterator[Figure]:
    """Compares lost tokens as shares of what was sampled: a kill comes at a slightly different token each time."""
    with_, without = ([each.num_lost / each.num_sampled for each in found.kills[name]] for name in ("with", "without"))
    details = {"progress_s": found.progress_s, "kills": msgspec.to_builtins(found.kills)}
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
    yield _cost(
        f"processor seconds of saving progress, {found.num_rollouts} rollouts of up to {NUM_TOKENS:,} tokens",
        found.spells,
        sum(spell.cpu_s for spell in found.spells),
        "all that the producer's processes take",
    )
    for num_tokens, spell in found.lengths.items():
        yield _cost(
            f"processor seconds of saving progress, {found.num_rollouts} rollouts of {num_tokens:,} tokens",
            [spell],
            spell.wall_s,
            "the time that passes",
        )


def _cost(name: str, spells: Sequence[Spell], reference: float, reference_is: str) -> Figure:
    """Compares the cost of every step of saving, and of all reading and writing of sockets."""
    num_saves, wall_s = sum(spell.num_saves for spell in spells), sum(spell.wall_s for spell in spells)
    return compare(
        name,
        unit="s",
        measured=sum(spell.saving_s + spell.sockets_s for spell in spells),
        reference=reference,
        reference_is=reference_is,
        goal=Goal(at_most=0.01),
        details={
            "spells": msgspec.to_builtins(spells),
            "share_of_wall": [(spell.saving_s + spell.sockets_s) / spell.wall_s for spell in spells],
            "seconds_between_saves": wall_s / num_saves if num_saves else None,
            "bytes_per_save": sum(spell.num_bytes for spell in spells) / num_saves if num_saves else None,
            "bytes_per_s": sum(spell.num_bytes for spell in spells) / wall_s,
        },
    )
