"""The gap of each producer, and the rule against a bad one.

The unit of evidence is a group: siblings share a prompt, a moment and a batch of the engine, so they are not
independent. Its gap is that of its rows in which every token has lag 0, by the trainer's own forward pass: engine
mismatch without drift. With `correction.proximal = "sampled_version"` it is that of all rows that one version sampled,
whatever their lag, recomputed under it. Groups with fewer than `MIN_TOKENS` such tokens are judged together with the
producer's next.

The rule: a producer instance whose last `NUM_JUDGED` judgements all lie outside the band, the mean that the gate allows
by the model's own yardstick, is quarantined. It is the strictest lower end of an interval: that of the least judgement.
A sound producer of which one group in ten lies outside, far more than was ever measured, is quarantined by chance once
in 10^5 judgements, one of which one in a hundred does once in 10^10; one whose groups are all outside is at its fifth.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.consumers.learning.learner.step_report import RowGap
from penstock.consumers.parity.tolerance import TOLERANCES, Tolerance
from penstock.schemas.config import RunConfig
from penstock.schemas.producer_parity import ProducerParity
from penstock.schemas.rollout import RolloutGroup

log = logging.getLogger(__name__)

NUM_JUDGED = 5
WARNED_AT = 64
"""Groups without a row that can be judged."""
MIN_TOKENS = {"float32": 16, "bfloat16": 64, "float16": 64}
"""By `model.dtype`. In bfloat16 one token in a thousand of a sound engine is off by several tenths of a nat, too much
for the mean of a few tokens."""


@dataclass
class _Instance:
    """waiting: tokens that are too few to be judged. judged: the last judgements. is_reported: it was quarantined."""

    producer_id: str
    waiting: RowGap = field(default_factory=RowGap)
    judged: deque[RowGap] = field(default_factory=lambda: deque(maxlen=NUM_JUDGED))
    is_reported: bool = False

    @property
    def parity(self) -> ProducerParity:
        num_tokens = sum(gap.num_tokens for gap in self.judged)
        mean = sum(gap.abs_sum for gap in self.judged) / num_tokens if num_tokens else None
        return ProducerParity(producer_id=self.producer_id, gap=mean)


class ProducerGaps:
    """Judges every producer instance by the gaps of its groups. With `parity.gate` = "off" it measures only.

    band: the mean gap that is allowed, in nats; the least one until `judge_by` gets the run's.
    """

    def __init__(self, config: RunConfig) -> None:
        self._judges = config.parity.gate != "off"
        self.band = TOLERANCES[config.model.dtype].mean
        self._min_tokens = MIN_TOKENS[config.model.dtype]
        self._instances: dict[str, _Instance] = {}
        self._num_without = 0
        """Groups so far, as long as none of them had a row that can be judged."""

    def judge_by(self, tolerance: Tolerance) -> None:
        self.band = tolerance.mean

    def observe(self, groups: Iterable[RolloutGroup], gaps: Mapping[int, RowGap]) -> dict[str, ProducerParity]:
        """Takes the gaps of settled groups, by index, each group once; returns the instances to quarantine. A group of
        several instances is evidence against none."""
        bad = {}
        for group in groups:
            if not self._instances and self._judges and group.index not in gaps:
                self._num_without += 1
                if self._num_without == WARNED_AT:
                    log.warning(
                        "no producer is judged by its logprobs: none of %d groups had a row of lag 0; "
                        "correction.proximal = 'sampled_version' judges rows of any lag",
                        WARNED_AT,
                    )
            if group.index in gaps and len(group.samplers) == 1:
                (name,) = group.samplers
                instance = self._instances.setdefault(name, _Instance(group.producer_id))
                if self._is_bad(instance, gaps[group.index]):
                    bad[name] = self._quarantine(instance)
        return bad

    def table(self) -> dict[str, ProducerParity]:
        """Returns the gap of every instance, without quarantines."""
        return {name: instance.parity for name, instance in self._instances.items()}

    def _is_bad(self, instance: _Instance, gap: RowGap) -> bool:
        """Returns True once, when the instance's last judgements all lie outside the band."""
        if not math.isfinite(gap.abs_sum):
            return False  # the trainer's own logprobs are not finite: those of a record are
        instance.waiting = instance.waiting.plus(gap)
        if instance.waiting.num_tokens < self._min_tokens:
            return False
        instance.judged.append(instance.waiting)
        instance.waiting = RowGap()
        if len(instance.judged) < NUM_JUDGED or any(judged.mean <= self.band for judged in instance.judged):
            return False
        is_first, instance.is_reported = not instance.is_reported, True
        return is_first and self._judges

    def _quarantine(self, instance: _Instance) -> ProducerParity:
        finding = instance.parity
        reason = (
            f"mean |engine - trainer| of each of its last {NUM_JUDGED} groups is above {self.band:.1e} nats,"
            f" the most that is allowed: {finding.gap:.1e} over all of them; ask `penstock parity`"
        )
        return replace(finding, quarantined_s=time.time(), reason=reason)
