"""Where the time of a group goes, from its release to the policy it made: for the run's log and for its trace.

A group's times tile it, in the order of `PHASES`; those before `stream` are its producer's and on the wire. They are
on several hosts' clocks, and none is before the one that precedes it. The trainer's half of a trace leaves with the
batch. Its root leaves when the group is committed: until then a rollback may undo what became of it.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from msgspec import UNSET

from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.observe.tracing import Tracing, trace_id
from penstock.schemas.process import clock
from penstock.schemas.rollout import RecordError, RolloutGroup
from penstock.schemas.spans import BATCH, ROOT, STREAM, SYNC, TRAIN, Span, Value, decode_spans

log = logging.getLogger(__name__)

PHASES = ("queue", "sample", "reward", "stream", "batch", "step")
"""Until it is claimed, sampled, scored, read by the trainer, taken into a batch, trained. `publish` follows, until its
policy is announced."""
NUM_SLOWEST = 3
"""Groups that a line of updates.jsonl names."""


@dataclass(frozen=True)
class GroupTimes:
    """The times of one group, ascending: its release, then the end of each of `PHASES`."""

    index: int
    times: tuple[float, ...]

    @classmethod
    def of(cls, group: RolloutGroup, *later_s: float) -> "GroupTimes":
        """later_s: the times at the trainer."""
        wire = group.timings
        released_s = wire.claimed_s if wire.released_s is UNSET else float(wire.released_s)
        times = released_s, wire.claimed_s, wire.generated_s, wire.appended_s, *later_s
        return cls(group.index, tuple(accumulate(times, max)))

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        return {name: end - start for name, (start, end) in zip(PHASES, pairwise(self.times), strict=False)}

    @property
    def total_s(self) -> float:
        return self.times[-1] - self.times[0]


@dataclass(eq=False)
class _Root:
    """The root of a settled group's trace, until it is committed. is_open: its policy is not announced yet."""

    index: int
    start_s: float
    end_s: float
    about: dict[str, Value]
    error: str = ""
    is_open: bool = False


@dataclass
class GroupTraces:
    """The times of this trainer's groups, and their traces if the run has them.

    run_id: see `penstock.schemas.keys.Commit`.
    """

    tracing: Tracing | None = None
    run_id: str = ""
    _settled: list[_Root] = field(default_factory=list)
    """Since the last snapshot."""
    _in_snapshot: list[_Root] = field(default_factory=list)
    _stepped: dict[int, tuple[float, list[_Root]]] = field(default_factory=dict)
    """By the version that is not announced yet: when its last step ended, and its groups."""
    _published_s: float | None = None
    """From a step to the announcement, of the last policy announced."""
    _announced: dict[int, tuple[float, int]] = field(default_factory=dict)
    """When policies were announced whose batch is not here yet, and their bytes."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def batch(
        self,
        groups: Sequence[RolloutGroup],
        report: StepReport,
        received_s: Mapping[int, float],
        *,
        update: int,
        policy_version: int,
        step_s: float,
        stepped_s: float,
    ) -> dict[str, Any]:
        """Takes a batch after its step; returns its part of a line of updates.jsonl: the mean seconds of its groups by
        phase, with those of the publication before, and the slowest groups.

        received_s: when each group was read, by index. stepped_s: when the step ended.
        """
        times = [GroupTimes.of(group, received_s[group.index], stepped_s - step_s, stepped_s) for group in groups]
        made = policy_version if report.skipped_reason is None else None
        roots: list[_Root] = []
        if self.tracing is not None and report.counts_as_update:
            about: dict[str, Value] = {"rl.loop.iteration": update, "rl.train.batch_size": len(groups)}
            settled = [
                (group, each)
                for group, each in zip(groups, times, strict=True)
                if report.settles(group.index) and group.index not in report.failed
            ]
            for group, each in settled:
                outcome = "trained" if report.teaches(group.index) else "skipped"
                roots.append(self._train(group, each, about | {"penstock.outcome": outcome}, made))
            self._settled += roots
        with self._changed:
            publish = {} if self._published_s is None else {"publish": self._published_s}
            if made is not None:
                self._stepped[made] = stepped_s, roots
                if made in self._announced:
                    self._announce(made, *self._announced.pop(made))
        slowest = sorted(times, key=lambda each: each.total_s, reverse=True)[:NUM_SLOWEST]
        return {
            "group_s": {name: sum(each.phases[name] for each in times) / len(times) for name in PHASES} | publish,
            "slowest_groups": [
                {
                    "index": each.index,
                    "total_s": each.total_s,
                    "phases": each.phases,
                    "trace_id": "" if self.tracing is None else trace_id(self.run_id, each.index),
                }
                for each in slowest
            ],
        }

    def _train(self, group: RolloutGroup, each: GroupTimes, about: dict[str, Value], made: int | None) -> _Root:
        ends = list(pairwise(each.times))[-3:]
        about = about | _about(group)
        spans = [Span(name, *end, about) for name, end in zip((STREAM, BATCH, TRAIN), ends, strict=True)]
        self._export(group.index, *spans)
        version: dict[str, Value] = {} if made is None else {"penstock.policy_version": made}
        return _Root(group.index, each.times[0], each.times[-1], about | version, is_open=made is not None)

    def sampled(self, index: int, data: bytes) -> None:
        """Takes the spans that came with a group, see `penstock.schemas.spans.ProducerSpans`."""
        if self.tracing is None:
            return
        try:
            sampled = decode_spans(data)
        except RecordError as error:
            log.warning("traces: group %d has none of its producer's: %s", index, error)
        else:
            self.tracing.export(self.run_id, index, sampled.spans, sampled.producer_id)

    def ended(self, outcome: str, index: int, group: RolloutGroup | None, received_s: float, error: str = "") -> None:
        """Takes a group that no batch trains. outcome: "skipped" or "dead", or why it is sampled again.

        group: as far as it could be read.
        """
        if self.tracing is None:
            return
        times = [received_s] if group is None else GroupTimes.of(group, received_s).times
        about = {"penstock.outcome": outcome, **({} if group is None else _about(group))}
        self._export(index, Span(STREAM, times[-2:][0], times[-1], about))
        if outcome in ("skipped", "dead"):
            self._settled.append(_Root(index, times[0], times[-1], about, error))

    def announced(self, version: int, num_bytes: int) -> None:
        """Notes that a policy is announced. May be called in any thread."""
        with self._changed:
            self._announced = {version: (clock.steady_s(), num_bytes)}
            if version in self._stepped:
                self._announce(version, *self._announced.pop(version))

    def _announce(self, version: int, at_s: float, num_bytes: int) -> None:
        stepped_s, roots = self._stepped.pop(version)
        self._published_s = at_s - stepped_s
        for root in roots:
            self._export(root.index, Span(SYNC, stepped_s, at_s, root.about | {"rl.sync.bytes": num_bytes}))
            root.end_s, root.is_open = at_s, False
        self._changed.notify_all()

    def snapshot(self) -> None:
        """Notes that a checkpoint begins, of all that was settled until now."""
        self._in_snapshot += self._settled
        self._settled = []

    @property
    def is_complete(self) -> bool:
        """False while a policy is not announced that a group in the last snapshot made."""
        return not any(root.is_open for root in self._in_snapshot)

    def commit(self, wait_s: float) -> None:
        """Exports the roots of the groups in the last snapshot, before it is committed. Waits `wait_s` at most until
        they are complete, and for the collector (`Tracing.flush`)."""
        if self.tracing is None:
            return
        with self._changed:
            self._changed.wait_for(lambda: self.is_complete, wait_s)
            for root in self._in_snapshot:
                self._export(root.index, Span(ROOT, root.start_s, root.end_s, root.about, error=root.error))
            self._in_snapshot = []
        self.tracing.flush()

    def _export(self, index: int, *spans: Span) -> None:
        assert self.tracing is not None
        self.tracing.export(self.run_id, index, spans)

    def close(self) -> None:
        if self.tracing is not None:
            self.tracing.close()


def _about(group: RolloutGroup) -> dict[str, Value]:
    return {"rl.environment.name": group.environment, "penstock.producer": group.producer_id}
