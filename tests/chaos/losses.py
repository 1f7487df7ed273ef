"""The double-entry count of tokens: those that each process sampled, against those that are trained; the difference was
lost with the process.

The bound, for a producer that is killed, is what a group samples in `producers.progress_s`. Half of that time lies
between two saves. A group that began less than a quarter of it before a save is left out of that save. Each save takes
the groups in turn: the time between a group's turns in two saves, beyond the pause, is allowed the last quarter.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from penstock.schemas.config import RunConfig
from tests.chaos.tally import mark_of

TOKEN_S = 0.01
"""Seconds per token of the engine in a leg of long rollouts: no token comes sooner."""
GRACE_S = 0.3
"""The producers' grace time there, where a rollout takes seconds."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was ended by a fault, and what it had sampled of groups that it did not append."""

    kind: str
    num_groups: int
    num_sampled: int
    """Tokens sampled of these groups."""
    num_lost: int
    most_lost: int
    """The most tokens lost by one group."""


def most_lost(config: RunConfig) -> int:
    """Returns the most tokens that a group may lose with one producer."""
    return int(config.producers.progress_s / TOKEN_S) * config.group_size


def compare(
    sampled: Mapping[int, Mapping[int, int]],
    ended: Mapping[int, str],
    trained_tokens: Mapping[tuple[int, int], int],
    limit: int,
) -> tuple[list[Loss], list[str]]:
    """Returns what each fault has cost, and the violations.

    sampled: tokens by process and index. ended: by process, the fault that ended it. trained_tokens: by index and token
    id. Only indexes that were trained are compared. limit: the tokens that a group may lose.
    """
    trained = {index for index, _ in trained_tokens}
    losses, problems = [], []
    for number, tally in sampled.items():
        lost = {
            index: (num - trained_tokens.get((index, mark_of(number)), 0), num)
            for index, num in tally.items()
            if index in trained
        }
        lost = {index: each for index, each in lost.items() if each[0]}
        for index, (num, of) in lost.items():
            if num < 0 or number not in ended:
                fate = ended.get(number, "lived on")
                problems.append(f"group {index}: {num} of {of} tokens of process {number} ({fate}) are not trained")
            elif num > limit:
                problems.append(
                    f"group {index}: {num} of {of} tokens were lost with process {number} ({ended[number]}), "
                    f"expected at most {limit}"
                )
        if number in ended:
            losses.append(
                Loss(
                    kind=ended[number],
                    num_groups=len(lost),
                    num_sampled=sum(of for _, of in lost.values()),
                    num_lost=sum(num for num, _ in lost.values()),
                    most_lost=max((num for num, _ in lost.values()), default=0),
                )
            )
    return losses, problems


def balance(
    sampled: Mapping[int, Mapping[int, int]],
    ended: Collection[int],
    trained: Collection[int],
    num_lost: int,
    counted: Mapping[str, int],
    limit: int,
) -> list[str]:
    """Checks that the run's own counts account for all sampled tokens but those lost; returns the violations.

    num_lost: tokens lost by indexes that are trained. counted: tokens by outcome. For each other index, a process that
    was ended may have lost `limit` tokens.
    """
    total = sum(sum(tally.values()) for tally in sampled.values())
    num_others = sum(index not in trained for number in ended for index in sampled.get(number, ()))
    unexplained = total - num_lost - sum(counted.values())
    if 0 <= unexplained <= limit * num_others:
        return []
    return [
        f"{total} tokens were sampled, {num_lost} of groups that are trained were lost, {dict(counted)} are counted: "
        f"{unexplained} are left, expected 0 to {limit * num_others}"
    ]


def by_outcome(attrition: Mapping[str, Mapping[str, Mapping[str, Any]]], what: str) -> Counter[str]:
    """Returns the sums of `num` or `num_tokens` of the counts in a checkpoint, over environments and lengths."""
    found: Counter[str] = Counter()
    for outcomes in attrition.values():
        for outcome, by_length in outcomes.items():
            found[outcome] += sum(counts[what] for counts in by_length.values())
    return found
