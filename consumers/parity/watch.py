"""The watch on each producer: a sequential test on its groups' gaps, and the same test on its groups that the trainer
refuses.

The unit of evidence is a group: siblings share a prompt, a moment and a batch of the engine, so they are not
independent. A group's gap is that of its rows that were recomputed under the policy that sampled them; fewer than
`UNIT_TOKENS` tokens wait for the producer's next group. A unit is out if `is_within` returns False for it.

The test is a CUSUM (E. S. Page, Continuous Inspection Schemes, 1954). A unit that is out adds `OUT` to the score, any
other subtracts `WITHIN`, down to 0: the ratio of the log-likelihoods of a producer with half its units out and of one
with 1 in 100, in small integers. The instance is found at `LIMIT`. One whose units are all out is found at the fourth,
one with half of them out at the ninth on average, and one with isolated units out, 1 in 100, after 2.6 million.

A group that the trainer refuses for its rows has no gap. A second score of the same kind counts groups as they arrive:
a refused group is out, any other is within. It falls even if no row has lag 0 and nothing lowers the first score, so
that an occasional refused group finds no instance then either.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.consumers.learning.learner.fresh_rows import RowGap
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.parity.gate import LagOf, at_lag_0, groups_by_instance, measured
from penstock.consumers.parity.report import TOLERANCES, ParityError, Tolerance, Verdict
from penstock.consumers.parity.verdict import MIN_TOKENS
from penstock.schemas.config import RunConfig
from penstock.schemas.producer_parity import ProducerParity
from penstock.schemas.rollout import RolloutGroup, one_line

log = logging.getLogger(__name__)

OUT, WITHIN, LIMIT = 6, 1, 20
UNIT_TOKENS = {"float32": MIN_TOKENS, "bfloat16": 256}
"""By `model.dtype`. In bfloat16 one token in a thousand of a sound engine is off by several tenths of a nat, too much
for the mean of a few tokens."""
RECENT = 8
"""The number of last units whose mean gap is shown."""
MAX_TOKENS = 2000
"""The most sampled tokens of one producer in a check for the cause, which takes about a tenth of a second."""

REFUSED = "refused"
"""The cause of a quarantine for groups that the trainer refuses."""
_UNEXPLAINED = (
    "`penstock parity` on the run tries the weights of other policies too, on the run file it names the layer"
)


def is_within(gap: RowGap, tolerance: Tolerance) -> bool:
    """Returns whether the gate allows the gap of a few groups: in the mean and, if chi-square has a bound, in k3, which
    is half of it while both are small."""
    return gap.mean <= tolerance.mean and (tolerance.chi2 is None or gap.k3 <= tolerance.chi2 / 2)


@dataclass
class WatchedProducer:
    """One instance.

    waiting: groups too small to be a unit by themselves. score, score_refused: of the two tests. refusal: why the first
        group in `score_refused` was refused. num_read: groups counted that were not refused.
    """

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
    """The verdict on its first groups, or on those after one that was out."""

    @property
    def gap(self) -> RowGap:
        """The gap over its last units."""
        total = RowGap()
        for each in self.recent:
            total = total.plus(each)
        return total

    @property
    def parity(self) -> ProducerParity:
        """Its figures, without a quarantine."""
        gap = self.gap.mean if self.recent else None
        return ProducerParity(producer_id=self.producer_id, gap=gap, num_rows=self.num_rows)


class ProducerWatch:
    """Judges every instance of a producer. With `parity.gate` = "off" it shows gaps and judges none.

    ranks: those that share the model.
    """

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        self._config = config
        self._ranks = Ranks() if ranks is None else ranks
        self._tolerance = TOLERANCES[config.model.dtype]
        self._watched: dict[str, WatchedProducer] = {}

    def examine(self, groups: Sequence[RolloutGroup], learner: Learner, version: int, lag_of: LagOf) -> None:
        """Runs the parity check on each producer instance in this batch, before it is trained, to name the cause of a
        later quarantine: once, and again while the instance's last groups are out.

        learner: with the weights of `version`. Its model is not changed.
        """
        if self._config.parity.gate == "off":
            return
        for instance, own in groups_by_instance(groups).items():
            if not self._wants_verdict(instance):
                continue
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
        """Takes the gaps of recomputed groups, by index; returns the instances to quarantine.

        Each group is given once, with the batch that settles it.
        """
        found = {}
        for instance, own in groups_by_instance(group for group in groups if group.index in gaps).items():
            for group in own:
                if self.observe(instance, group.producer_id, gaps[group.index]):
                    found[instance] = self.found(instance)
        return self._to_quarantine(found)

    def observe_refused(self, instance: str, producer_id: str, num_read: int, reason: str) -> ProducerParity | None:
        """Takes a group that this instance sampled alone and that is refused for its rows. Returns a quarantine if the
        instance is found now and the gate refuses.

        num_read: its earlier groups that were not refused. reason: one line.
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
        """Returns the instances found if the gate refuses; otherwise warns about them."""
        if self._config.parity.gate == "refuse":
            return found
        for each in found.values():
            log.warning('%s is trained all the same (parity.gate = "warn"): %s', each.producer_id, each.says)
        return {}

    def observe(self, instance: str, producer_id: str, gap: RowGap) -> bool:
        """Takes the gap of a group's rows, each recomputed under the policies that its labels name. Returns True once,
        when the instance is found."""
        if not math.isfinite(gap.abs_sum):
            return False  # the trainer's own logprobs are not finite: those of a record are
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
        """Returns the figures of every instance, without quarantines."""
        return {instance: each.parity for instance, each in self._watched.items()}

    def _of(self, instance: str, producer_id: str) -> WatchedProducer:
        return self._watched.setdefault(instance, WatchedProducer(producer_id))

    def found(self, instance: str) -> ProducerParity:
        """Returns the quarantine of an instance that was found."""
        producer, allowed = self._watched[instance], self._tolerance.mean
        if producer.score_refused >= LIMIT:
            says = f"the trainer refuses its groups, the first one as {producer.refusal}"
            return replace(producer.parity, quarantined_s=time.time(), cause=REFUSED, says=says)
        cause, says = "unexplained", _UNEXPLAINED
        if (verdict := producer.verdict) is not None and verdict.status == "mismatch":
            cause, says = verdict.cause, verdict.sentence
        gap = f"mean |engine - trainer| of its last groups is {producer.gap.mean:.1e} nats, {allowed:.0e} is allowed"
        return replace(producer.parity, quarantined_s=time.time(), cause=cause, says=f"{gap}; {says}")
