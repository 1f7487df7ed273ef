"""The gate, which allows no optimizer step before engine and trainer agree, and the alert if they disagree later."""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Protocol

import msgspec

from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.parity.report import NOT_COMPARABLE, REPORT_FILE, ParityError, ParityReport, Verdict
from penstock.consumers.parity.tolerance import TOLERANCES, Tolerance, Yardstick
from penstock.schemas.config import RunConfig
from penstock.schemas.policy import FutureVersionError, UnknownVersionError
from penstock.schemas.process.files import write_whole
from penstock.schemas.rollout import Rollout, RolloutGroup, Segment, VersionSpan

log = logging.getLogger(__name__)

WINDOW = 8
"""The number of batches with rows of lag 0 whose mean the alert judges: one batch may have few such tokens."""
MAX_BATCHES = 8
"""If so many batches leave open whether the gap is beyond the tolerance, it is close to it, and the run goes on."""

LagOf = Callable[[int], int]


class ParityRefusedError(RuntimeError):
    """Engine and trainer disagree, and `parity.gate` is "refuse". Nothing was trained on the batch."""


class Checks(Protocol):
    """Checks groups against the model in memory; see `penstock.consumers.parity.loaded.LoadedChecks`."""

    yardstick: Yardstick | None

    @property
    def tolerance(self) -> Tolerance: ...

    def measure(self, groups: Sequence[RolloutGroup], model: PackedModel) -> None: ...

    def check(self, groups: Sequence[RolloutGroup], model: PackedModel, version: int) -> ParityReport: ...


class Gate:
    """Checks the first batch that holds tokens of the trainer's current weights, before anything is trained on it.

    That is the first batch of a new run. An adapter, which has no effect at first, is checked again with the first
    batch that a trained one sampled. After a resume, batches sampled by older weights come first; they pass unchecked,
    and the gate stays pending. So it does if a batch has a gap beyond the tolerance but not the rollouts to show it:
    that batch is trained, and the next one's evidence is added, for `MAX_BATCHES` batches.

    The model's yardstick is measured on the first batch, whoever sampled it.

    on_measured: called with the run's tolerance. ranks: those that share the model.
    """

    def __init__(
        self,
        config: RunConfig,
        run_folder: Path,
        checks: Checks,
        on_measured: Callable[[Tolerance], None] = lambda tolerance: None,
        ranks: Ranks | None = None,
    ) -> None:
        self._config = config
        self._checks = checks
        self._on_measured = on_measured
        self._ranks = Ranks() if ranks is None else ranks
        self._file = run_folder / REPORT_FILE
        self.is_pending = config.parity.gate != "off"
        self._is_measured = False
        self._num_undecided = 0
        self._last_line = ""

    def check(self, groups: Sequence[RolloutGroup], model: PackedModel, version: int, lag_of: LagOf) -> None:
        """Checks a batch while the gate is pending.

        Args:
            groups: the batch.
            model: the trainer's, with the weights of `version`. It is not changed.
            version: the trainer's own.
            lag_of: lags for `version`.

        Raises:
            ParityRefusedError: `parity.gate` is "refuse", and engine and trainer disagree or the records cannot be
                compared. The report is in `<run>/parity.json`.
        """
        if not self._is_measured:
            self._measure(groups, model)
        fresh = [group for each in groups if (group := at_lag_0(each, version, lag_of)) is not None]
        if not fresh:
            self._log_once(
                "no rollouts of the newest policy in this batch: parity is checked with the first that has some"
            )
            return
        report, problem = self._measured(fresh, model, version)
        verdict = report.verdict
        if problem and self._config.parity.gate == "refuse":
            self._write(report)
            raise ParityRefusedError(f'the parity gate refuses to train (parity.gate = "refuse"): {problem}')
        if verdict.status == "unclear" and not self._is_given_up(verdict):
            self._log_once(f"parity: {verdict.sentence}")
            return
        # At the base any use of the adapter is right.
        self.is_pending = model.is_base
        self._write(report)
        if verdict.status == "parity":
            log.info("%s (%.1f s)", verdict.sentence, report.seconds)
        elif verdict.status == "unclear":
            log.warning("parity: still undecided after %d batches, the run goes on: %s", MAX_BATCHES, verdict.sentence)
        else:
            log.warning('engine and trainer disagree, trained all the same (parity.gate = "warn"): %s', problem)

    def _measure(self, groups: Sequence[RolloutGroup], model: PackedModel) -> None:
        """Measures the yardstick on every rank."""
        log.info("parity: engine and trainer are compared on the first %d groups", len(groups))
        self._is_measured = True
        self._ranks.order("yardstick", lambda _: (groups,))
        self._ranks.phase = "gate"
        self._checks.measure(groups, model)
        if (yardstick := self._checks.yardstick) is None:
            return
        tolerance = self._checks.tolerance
        log.info(
            "yardstick: exact computations of this model differ by %.1e nats over %d tokens; a mean of %.1e is allowed",
            yardstick.mean,
            yardstick.num_tokens,
            tolerance.mean,
        )
        self._on_measured(tolerance)

    def _is_given_up(self, verdict: Verdict) -> bool:
        """Counts an undecided batch; returns whether it was the last one."""
        self._num_undecided += verdict.cause == "undecided"
        return self._num_undecided >= MAX_BATCHES

    def _measured(self, groups: Sequence[RolloutGroup], model: PackedModel, version: int) -> tuple[ParityReport, str]:
        """Returns the report on some groups and the reason to refuse them, "" if there is none."""
        self._ranks.order("gate", lambda _: (groups, version))
        self._ranks.phase = "gate"
        try:
            report = self._checks.check(groups, model, version)
        except ParityError as error:
            return self._not_comparable(groups, str(error)), f"parity cannot be checked: {error}"
        report = msgspec.structs.replace(report, gate=self._config.parity.gate, points=())
        return report, report.verdict.sentence if report.verdict.status == "mismatch" else ""

    def _not_comparable(self, groups: Sequence[RolloutGroup], why: str) -> ParityReport:
        """Returns the report of a check that could not be made."""
        return ParityReport(
            verdict=Verdict(
                status="unclear",
                cause=NOT_COMPARABLE,
                sentence=f"could not tell: {why}",
                advice="look at what producers record",
            ),
            dtype=self._config.model.dtype,
            tolerance=self._checks.tolerance,
            num_groups=len(groups),
            num_rollouts=sum(len(group.rollouts) for group in groups),
            gate="refuse",
            yardstick=self._checks.yardstick,
        )

    def _write(self, report: ParityReport) -> None:
        write_whole(self._file, msgspec.json.format(msgspec.json.encode(report), indent=1))

    def _log_once(self, text: str) -> None:
        """Logs a text unless it was the last one logged."""
        if text != self._last_line:
            self._last_line = text
            log.warning("%s", text)


class Alert:
    """Watches the gap at lag 0, engine mismatch without drift, as a mean over the last `WINDOW` batches that have one.

    It is raised while that is outside its band: the mean of the least tolerance until `judge_by` gets the run's.
    """

    def __init__(self, config: RunConfig) -> None:
        self.band = TOLERANCES[config.model.dtype].mean
        self._gaps: deque[float] = deque(maxlen=WINDOW)
        self.gap = math.nan
        """The mean; NaN before the first."""
        self.is_raised = False

    def judge_by(self, tolerance: Tolerance) -> None:
        self.band = tolerance.mean

    def watch(self, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one batch; one without rows of lag 0 changes nothing."""
        newest = metrics.get("mismatch_lag0", math.nan)
        if math.isnan(newest):
            return
        self._gaps.append(newest)
        self.gap = gap = fmean(self._gaps)
        if (gap > self.band) == self.is_raised:
            return
        self.is_raised = not self.is_raised
        if self.is_raised:
            log.warning(
                "parity alert: mean |engine - trainer| at lag 0 is %.1e nats, %.1e is allowed; ask `penstock parity`",
                gap,
                self.band,
            )
        else:
            log.info("parity alert over: mean |engine - trainer| at lag 0 is %.1e nats", gap)


def at_lag_0(group: RolloutGroup, version: int, lag_of: LagOf) -> RolloutGroup | None:
    """Returns the rollouts that the trainer's current weights sampled alone, labelled `version`; None without one.

    After a resume the checkpoint's version and the new one name the same weights; the model in memory has the new one.
    """
    kept = [rollout for rollout in group.rollouts if _is_fresh(rollout, lag_of)]
    if not kept:
        return None
    rollouts = tuple(
        msgspec.structs.replace(rollout, segments=tuple(_labelled(segment, version) for segment in rollout.segments))
        for rollout in kept
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def _is_fresh(rollout: Rollout, lag_of: LagOf) -> bool:
    spans = [span for segment in rollout.segments for span in segment.version_spans]
    try:
        return bool(spans) and all(lag_of(span.version) == 0 for span in spans)
    except (UnknownVersionError, FutureVersionError):
        return False


def _labelled(segment: Segment, version: int) -> Segment:
    spans = tuple(VersionSpan(version, span.start, span.end) for span in segment.version_spans)
    return msgspec.structs.replace(segment, version_spans=spans)
