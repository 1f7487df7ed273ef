"""Each producer, watched for the band that the gate proved: a sequential test on its groups' gaps, and the same test on
how many of its groups the trainer refuses.

The unit is a group: siblings share a prompt, a moment and a batch of the engine, so that they are no independent
evidence. What a group shows is the gap of its rows that were recomputed under the very policy that sampled them; fewer
than `UNIT_TOKENS` tokens wait for the producer's next group. A unit is out if `is_within` denies it.

The test is a CUSUM (E. S. Page, Continuous Inspection Schemes, 1954). A unit that is out adds `OUT` to the score, one
that is not takes `WITHIN` off it, down to 0: the ratio of log-likelihoods of a producer half of whose units are out and
of one with 1 in 100, in small integers. The instance is found at `LIMIT`. One whose units are all out is found by the
fourth, one of whose units half are by the ninth in the mean, and one with 1 in 100, each by itself, after 2.6 million.

A group that the trainer refuses for its rows shows no gap. A second score of the same kind takes the groups as they
arrive: one that is refused is out, one that is not is within. It falls also where no row has lag 0 and nothing takes
off the first one, so that a refused group now and then finds nobody there either.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.consumers.learning.fresh_rows import RowGap
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.model import PackedModel
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.parity.gate import LagOf, at_lag_0, measured
from penstock.consumers.parity.report import TOLERANCES, ParityError, Tolerance, Verdict
from penstock.consumers.parity.verdict import MIN_TOKENS
from penstock.schemas.config import RunConfig
from penstock.schemas.producer_parity import ProducerParity
from penstock.schemas.rollout import RolloutGroup, one_line

log = logging.getLogger(__name__)

OUT, WITHIN, LIMIT = 6, 1, 20
UNIT_TOKENS = {"float32": MIN_TOKENS, "bfloat16": 256}
"""By `model.dtype`. In bfloat16 one token in a thousand of a sound engine is off by several tenths of a nat: of a few
tokens it would be too much."""
RECENT = 8
"""Groups whose mean gap is shown."""
MAX_TOKENS = 2000
"""Sampled tokens of one producer that the check looks at for a cause: a tenth of a second or so."""

REFUSED = "refused"
"""The cause of a quarantine for groups that the trainer refuses."""
_UNEXPLAINED = (
    "`penstock parity` on the run tries the weights of other policies too, on the run file it names the layer"
)


def is_within(gap: RowGap, tolerance: Tolerance) -> bool:
    """Whether the gap of a few groups is one that the gate allows: in the mean and, where chi-square has a bound, in
    k3, which is half of it while both are small."""
    return gap.mean <= tolerance.mean and (tolerance.chi2 is None or gap.k3 <= tolerance.chi2 / 2)


@dataclass
class WatchedProducer:
    """One instance. waiting: groups too small to be a unit by themselves. score, score_refused: the two of the above.
    refusal: why the first group in the second was refused. num_read: those that it has taken and were not."""

    producer_id: str
    waiting: RowGap = field(default_factory=RowGap)
    recent: deque[RowGap] = field(default_factory=lambda: deque(maxlen=RECENT))
    num_rows: int = 0
    score: int = 0
    score_refused: int = 0
    refusal: str = ""
    num_read: int = 0
    is_found: bool = False
    verdict: Verdict | None = None
    """Of the check of its first groups, or of those after one that was out."""

    @property
    def gap(self) -> RowGap:
        """Over its last groups."""
        total = RowGap()
        for each in self.recent:
            total = total.plus(each)
        return total


class ProducerWatch:
    """Judges every instance of a producer. `parity.gate` = "off" shows gaps and judges nobody.

    ranks: those that share the model.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        self._ranks = Ranks() if ranks is None else ranks
        self._tolerance = TOLERANCES[config.model.dtype]
        self._watched: dict[str, WatchedProducer] = {}

    def examine(self, groups: Sequence[RolloutGroup], learner: Learner, version: int, lag_of: LagOf) -> None:
        """Has the parity check name what is wrong with producers in this batch, before it is trained: of each instance
        once, and again while its last groups were out. It decides nothing.

        learner: with the weights of `version`. Its model is not changed.
        """
        if self._config.parity.gate == "off":
            return
        by_instance: dict[str, list[RolloutGroup]] = {}
        for group in groups:
            if len(group.samplers) == 1 and self._wants_verdict(group.samplers[0]):
                by_instance.setdefault(group.samplers[0], []).append(group)
        for instance, own in by_instance.items():
            fresh = [kept for group in own if (kept := at_lag_0(group, version, lag_of)) is not None]
            if not fresh:
                continue
            verdict = self._examined(fresh, learner.model, version)
            if verdict.status == "unclear":
                continue
            self._of(instance, own[0].producer_id).verdict = verdict
            if verdict.status == "mismatch":
                log.warning("producer %s: %s", one_line(own[0].producer_id), verdict.sentence)

    def _examined(self, fresh: Sequence[RolloutGroup], model: PackedModel, version: int) -> Verdict:
        self._ranks.order("gate", lambda _: (fresh, version, MAX_TOKENS))
        self._ranks.phase = "gate"
        try:
            return measured(fresh, self._config, model, version, MAX_TOKENS).verdict
        except ParityError as error:
            return Verdict(status="mismatch", cause="unexplained", sentence=f"parity cannot be checked: {error}")

    def _wants_verdict(self, instance: str) -> bool:
        known = self._watched.get(instance)
        if known is None or known.verdict is None:
            return True
        return known.score > 0 and known.verdict.status != "mismatch"

    def observe_groups(self, groups: Iterable[RolloutGroup], gaps: Mapping[int, RowGap]) -> dict[str, ProducerParity]:
        """Takes what was recomputed of these groups, by index; returns the instances that are to be quarantined.

        A group that several instances sampled is evidence against none of them. Each is to be given once: with the
        batch that settles it.
        """
        found = {}
        for group in groups:
            gap = gaps.get(group.index)
            if gap is None or len(group.samplers) > 1:
                continue
            if self.observe(group.samplers[0], group.producer_id, gap):
                found[group.samplers[0]] = self.found(group.samplers[0])
        return self._to_quarantine(found)

    def observe_refused(self, instance: str, producer_id: str, num_read: int, reason: str) -> ProducerParity | None:
        """Takes a group of this instance alone that is refused for its rows. Returns what the quarantine says, if the
        instance is found by it and is to be quarantined.

        num_read: its groups before this one that were not refused. reason: one line.
        """
        if self._config.parity.gate == "off":
            return None
        producer = self._of(instance, producer_id)
        producer.score_refused = max(0, producer.score_refused - WITHIN * (num_read - producer.num_read))
        producer.num_read = num_read
        if not producer.score_refused:
            producer.refusal = reason
        producer.score_refused += OUT
        if producer.is_found or producer.score_refused < LIMIT:
            return None
        producer.is_found = True
        return self._to_quarantine({instance: self.found(instance)}).get(instance)

    def _to_quarantine(self, found: dict[str, ProducerParity]) -> dict[str, ProducerParity]:
        """Those found, if the gate refuses; says so of the others."""
        if self._config.parity.gate == "refuse":
            return found
        for each in found.values():
            log.warning('%s is trained all the same (parity.gate = "warn"): %s', each.producer_id, each.says)
        return {}

    def observe(self, instance: str, producer_id: str, gap: RowGap) -> bool:
        """Takes a group's rows, each recomputed under the policies that its labels name. Returns whether the instance
        is found by them: True once."""
        if not math.isfinite(gap.abs_sum):
            return False  # the trainer's own logprobs: those of a record are finite
        producer = self._of(instance, producer_id)
        producer.num_rows += gap.num_rows
        producer.waiting = producer.waiting.plus(gap)
        if producer.waiting.num_tokens < UNIT_TOKENS[self._config.model.dtype]:
            return False
        unit, producer.waiting = producer.waiting, RowGap()
        producer.recent.append(unit)
        is_out = not is_within(unit, self._tolerance)
        producer.score = max(0, producer.score + (OUT if is_out else -WITHIN))
        if producer.is_found or self._config.parity.gate == "off" or producer.score < LIMIT:
            return False
        producer.is_found = True
        return True

    def table(self) -> dict[str, ProducerParity]:
        """Every instance watched, none of them quarantined."""
        return {
            instance: ProducerParity(
                producer_id=each.producer_id,
                gap=each.gap.mean if each.recent else None,
                num_rows=each.num_rows,
            )
            for instance, each in self._watched.items()
        }

    def _of(self, instance: str, producer_id: str) -> WatchedProducer:
        return self._watched.setdefault(instance, WatchedProducer(producer_id))

    def found(self, instance: str) -> ProducerParity:
        """What a quarantine of this instance says."""
        producer, allowed = self._watched[instance], self._tolerance.mean
        if producer.score_refused >= LIMIT:
            says = f"the trainer refuses its groups, the first one as {producer.refusal}"
            return replace(self.table()[instance], quarantined_s=time.time(), cause=REFUSED, says=says)
        cause, says = "unexplained", _UNEXPLAINED
        if (verdict := producer.verdict) is not None and verdict.status == "mismatch":
            cause, says = verdict.cause, verdict.sentence
        gap = f"mean |engine - trainer| of its last groups is {producer.gap.mean:.1e} nats, {allowed:.0e} is allowed"
        return replace(self.table()[instance], quarantined_s=time.time(), cause=cause, says=f"{gap}; {says}")
