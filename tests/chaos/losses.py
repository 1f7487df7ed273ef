"""The double entry of tokens: what each process has sampled, against what is trained; the difference was lost with it.

The bound, for a producer that is killed: what a group samples in `producers.progress_s`. Half of that lies between two
savings. A group that has begun less than a quarter of it before a saving is left out of it. And each saving takes the
groups in turn: what lies between the turns of one group in two of them, beside the pause, is given the last quarter.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from penstock.schemas.config import RunConfig
from tests.chaos.tally import mark_of

TOKEN_S = 0.01
"""Of the engine in a leg of long rollouts: no token comes sooner."""
GRACE_S = 0.3
"""What a producer that is told to stop has there, where a rollout takes seconds."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was ended by a fault, and what it had sampled of groups that it did not live to append."""

    kind: str
    num_groups: int
    num_sampled: int
    """Tokens of these groups."""
    num_lost: int
    most_lost: int
    """By one group."""


def most_lost(config: RunConfig) -> int:
    """The most tokens that a group may lose with one producer."""
    return int(config.producers.progress_s / TOKEN_S) * config.group_size


def compare(
    sampled: Mapping[int, Mapping[int, int]],
    ended: Mapping[int, str],
    trained_tokens: Mapping[tuple[int, int], int],
    limit: int,
) -> tuple[list[Loss], list[str]]:
    """What each fault has cost, and what must not be.

    sampled: by process and index its tokens. ended: by process the fault that ended it. trained_tokens: by index and
    token id. Only indexes that were trained are compared. limit: of tokens lost by a group.
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
    """Whether what was sampled is what the run's own counts say became of it, but for what was lost.

    num_lost: of indexes that are trained. counted: tokens by outcome. Of other indexes a process that was ended may
    have lost `limit` each.
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
    """Sums of `num` or `num_tokens` of the counts in a checkpoint, over environments and lengths."""
    found: Counter[str] = Counter()
    for outcomes in attrition.values():
        for outcome, by_length in outcomes.items():
            found[outcome] += sum(counts[what] for counts in by_length.values())
    return found
