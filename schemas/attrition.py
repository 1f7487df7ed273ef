"""Attrition: the outcome of each sampled rollout, by its length, and whether long ones are lost more often.

A long rollout spans more policies, restarts and deadlines than a short one. If long ones are lost, the trained rollouts
are not representative: policy and figures are biased towards short answers without any failure.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock.schemas.metrics import LENGTH_BUCKETS
from penstock.schemas.rollout import MAX_REWARD, RolloutGroup, says_too_long

OUTCOMES = ("trained", "skipped", "stale", "quarantined", "dead", "missing", "duplicate")
"""Of a rollout: that of its group. `stale`: every token of the group was older than twice max_lag; `quarantined`: a
quarantined producer sampled it; the index of either was sampled again. `duplicate`: another group of its index came
first. `missing`: it ended without a reward, and its group continued without it. All but stale, quarantined and
duplicate rollouts belong to a settled index."""
UNKNOWN = "unknown"
"""The length of a rollout without a record."""
BEYOND = 1 << 31
"""The assumed length of a group that was too long for a deadline or a stream entry: longer than all that arrived."""
WINDOW = 256
"""Groups of each comparison."""
LOST_GAP = 0.2
"""The alarm is raised if the share of lost groups among the longest quarter exceeds that of the others by it."""


class Rollouts(msgspec.Struct):
    """Counts of rollouts, and sums over them. num_scored: those with a reward."""

    num: int = 0
    num_tokens: int = 0
    """Sampled."""
    num_tokens_masked: int = 0
    """Sampled tokens older than twice max_lag when they were trained."""
    num_scored: int = 0
    reward_sum: float = 0.0
    finish_reasons: dict[str, int] = {}

    def __add__(self, other: "Rollouts") -> "Rollouts":
        return self._combined(operator.add, other)

    def __sub__(self, earlier: "Rollouts") -> "Rollouts":
        """Returns what was counted since `earlier`."""
        return self._combined(operator.sub, earlier)

    def _combined(self, combine: Callable[[float, float], Any], other: "Rollouts") -> "Rollouts":
        *sums, reasons = msgspec.structs.astuple(self)
        *other_sums, other_reasons = msgspec.structs.astuple(other)
        by_reason = {
            reason: combine(reasons.get(reason, 0), other_reasons.get(reason, 0)) for reason in reasons | other_reasons
        }
        combined = Rollouts(*map(combine, sums, other_sums))
        combined.finish_reasons = {reason: num for reason, num in by_reason.items() if num}
        return combined


Counts = dict[str, dict[str, dict[str, Rollouts]]]
"""By environment, outcome and length: the power of 2 that the sampled tokens do not exceed, 0, or `UNKNOWN`."""


class LostByLength(msgspec.Struct, frozen=True, kw_only=True):
    """The groups lost of the longest quarter of a window and of the others.

    A group counts once, by its longest rollout: siblings share its outcome. It is lost if it is stale or dead, or
    trained with most of its sampled tokens masked for their lag. Groups of one length stay together: the quarter is the
    nearest cut between two lengths.
    """

    cut: int
    """Least number of tokens in the longest rollout of a group in the longest quarter."""
    num_long: int
    num_long_lost: int
    num_other: int
    num_other_lost: int

    @property
    def is_alarm(self) -> bool:
        return self.num_long_lost / self.num_long - self.num_other_lost / self.num_other >= LOST_GAP

    def __str__(self) -> str:
        return (
            f"{self.num_long_lost} of the {self.num_long} longest groups ({self.cut:,} tokens or more) were lost, "
            f"{self.num_other_lost} of the {self.num_other} others"
            if self.cut < BEYOND
            else f"{self.num_long_lost} groups ran into their deadline, {self.num_other_lost} of the {self.num_other} "
            "others were lost"
        )


class Attrition(msgspec.Struct):
    """The counts of a run, including those of earlier trainers: part of every checkpoint."""

    rollouts: Counts = {}
    num_tries_lost: int = 0
    """Attempts at groups that were lost when their producer was killed or stopped, and not continued: whole groups of
    rollouts, of unknown lengths."""
    window: list[tuple[int, bool]] = []
    """For each group since the last comparison, the tokens of its longest rollout and whether it was lost."""
    last: LostByLength | None = None
    """Of the last full window; None before the first, or if its groups were all of one length."""

    def add(
        self,
        environment: str,
        outcome: str,
        group: RolloutGroup | None,
        num_siblings: int,
        num_masked: Sequence[int] = (),
        *,
        is_too_long: bool = False,
    ) -> None:
        """Counts the rollouts of a group.

        group: None if it is unknown. num_siblings: the number that was to be sampled. num_masked: sampled tokens beyond
            the lag bound, by rollout. is_too_long: it missed a deadline, or was too large for an entry; a missing
            sibling (`RolloutGroup.missing`) that was too long also makes a group lost, since the comparison is about
            long ones.
        """
        rollouts = () if group is None else group.rollouts[:num_siblings]
        of_environment = self.rollouts.setdefault(environment, {})
        by_length = of_environment.setdefault(outcome, {})
        lengths = []
        for n, rollout in enumerate(rollouts):
            num_tokens, reward = rollout.num_sampled_tokens, rollout.reward.value
            lengths.append(num_tokens)
            counts = by_length.setdefault(length_bucket(num_tokens), Rollouts())
            counts.num += 1
            counts.num_tokens += num_tokens
            counts.num_tokens_masked += num_masked[n] if num_masked else 0
            if abs(reward) <= MAX_REWARD:  # that of a dead one may be any number, or none
                counts.num_scored += 1
                counts.reward_sum += reward
            reason = rollout.segments[-1].finish_reason
            counts.finish_reasons[reason] = counts.finish_reasons.get(reason, 0) + 1
        if num_missing := num_siblings - len(rollouts):
            kind = "missing" if outcome in ("trained", "skipped") else outcome  # else its index has no end with this
            of_environment.setdefault(kind, {}).setdefault(UNKNOWN, Rollouts()).num += num_missing
        if outcome == "duplicate":  # the other group of its index stands for it
            return
        if group is not None:
            self.num_tries_lost += max(0, group.num_tries_lost)
        lost_longest = (is_too_long and not lengths) or (group is not None and says_too_long(group.missing))
        if (lengths or lost_longest) and outcome != "quarantined":
            is_lost = lost_longest or outcome in ("stale", "dead") or 2 * sum(num_masked) > sum(lengths)
            self._compare(BEYOND if lost_longest else max(lengths), is_lost)

    def _compare(self, length: int, is_lost: bool) -> None:
        self.window.append((length, is_lost))
        if len(self.window) == WINDOW:
            self.last = lost_by_length(self.window)
            self.window = []

    def counts(self) -> Iterator[tuple[str, str, str, Rollouts]]:
        """Yields (environment, outcome, length, counts), sorted by environment and outcome."""
        for environment, outcomes in sorted(self.rollouts.items()):
            for outcome in OUTCOMES:
                for length, counts in outcomes.get(outcome, {}).items():
                    yield environment, outcome, length, counts

    def copied(self) -> dict[tuple[str, str, str], Rollouts]:
        """Returns a copy of the counts."""
        return {(name, outcome, length): counts + Rollouts() for name, outcome, length, counts in self.counts()}

    def since(self, before: Mapping[tuple[str, str, str], Rollouts]) -> Counts:
        """Returns what was counted since the counts were `copied`."""
        found: Counts = {}
        for environment, outcome, length, counts in self.counts():
            new = counts - before.get((environment, outcome, length), Rollouts())
            if new.num:
                found.setdefault(environment, {}).setdefault(outcome, {})[length] = new
        return found

    def by_environment(self) -> dict[str, dict[str, Rollouts]]:
        """Returns the counts over all lengths, by environment and outcome."""
        return {
            environment: {outcome: sum(by_length.values(), Rollouts()) for outcome, by_length in outcomes.items()}
            for environment, outcomes in self.rollouts.items()
        }


def length_bucket(num_tokens: int) -> str:
    """Returns the smallest power of 2 not below `num_tokens`, as text; 0 for 0; `+Inf` above all `LENGTH_BUCKETS`."""
    bucket = 1 << (num_tokens - 1).bit_length() if num_tokens else 0
    return str(bucket) if bucket <= LENGTH_BUCKETS[-1] else "+Inf"


def lost_by_length(groups: Iterable[tuple[int, bool]]) -> LostByLength | None:
    """Compares the groups of a window by their length and whether they were lost; None if all are of one length."""
    lengths, lost = zip(*groups, strict=True)
    cuts = sorted(set(lengths))[1:]
    if not cuts:
        return None
    cut = min(cuts, key=lambda cut: abs(4 * sum(length >= cut for length in lengths) - len(lengths)))
    long = [is_lost for length, is_lost in zip(lengths, lost, strict=True) if length >= cut]
    others = [is_lost for length, is_lost in zip(lengths, lost, strict=True) if length < cut]
    return LostByLength(
        cut=cut,
        num_long=len(long),
        num_long_lost=sum(long),
        num_other=len(others),
        num_other_lost=sum(others),
    )
