"""The record of rollouts: each batch as it was trained, with the trainer's findings. Training does not depend on it."""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.consumers.learning.batch.batch import Batch, Place
from penstock.consumers.learning.batch.lag import KnownLags, LagTable, known_lags, span_lags
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN, StepReport
from penstock.consumers.learning.loss.rows import LOG_RATIO_BOUND
from penstock.consumers.observe.record_files import RecordFiles
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.ledger import RunFailedError
from penstock.consumers.stream.reader import Refused
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.config import RunConfig
from penstock.schemas.model_digest import model_digest
from penstock.schemas.record import (
    FOLDER,
    BatchHead,
    GroupEntry,
    Outcome,
    RecordedGroup,
    RecordHeader,
    SegmentFindings,
    dead_group,
    encode_batch,
    group_entry,
)
from penstock.schemas.rollout import RolloutGroup, Segment, encode_group, one_line, unpack_floats

log = logging.getLogger(__name__)

DIED_BEFORE = "its groups died or were skipped before they could be trained"


class Taken(NamedTuple):
    """A batch that the trainer took.

    position: its number along the line of policies, from 0. num_batches: updates made before it. lag_of: when it was
        taken.
    """

    position: int
    num_batches: int
    groups: Sequence[RolloutGroup]
    batch: Batch
    report: StepReport
    lag_of: LagTable


class RolloutRecorder:
    """Writes the record of one trainer epoch (`penstock.schemas.record`), and where earlier epochs were cut.

    A thread encodes and writes a batch while the next one is trained. `add` waits for the previous batch, `sync` for
    the last one; the end of the write unblocks both.

    taken: the positions at which earlier epochs were cut, by epoch. num_ranks: the ranks that share the model.
    """

    def __init__(
        self,
        config: RunConfig,
        run_folder: Path,
        epoch: int,
        taken: Mapping[int, int],
        lag_of: LagTable,
        num_ranks: int = 1,
    ) -> None:
        self._config = config
        trainer = msgspec.structs.replace(config.trainer, num_processes=num_ranks)
        header = RecordHeader(
            run=config.name,
            epoch=epoch,
            line=dict(taken),
            forks=lag_of.forks,
            announced=lag_of.announced,
            config=msgspec.to_builtins(msgspec.structs.replace(config, trainer=trainer)),
            model_digest=model_digest(Path(config.model.path)),
        )
        self._files = RecordFiles(run_folder / FOLDER, header, config.recording.max_mb)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._writing: Future[None] | None = None
        self._failure: RunFailedError | None = None

    def add(self, taken: Taken) -> None:
        """Records a batch, which counts once a later checkpoint is committed or the trainer continues.

        Raises:
            RunFailedError: an earlier batch cannot be recorded, for a reason other than a full disk.
        """
        self._wait()
        lag_of = LagTable(taken.lag_of.current, taken.lag_of.forks, taken.lag_of.announced)  # as it is now
        self._writing = self._thread.submit(self._append, taken._replace(lag_of=lag_of))

    def add_dead(self, dead: Sequence[Refused], position: int, num_batches: int, policy_version: int) -> None:
        """Records groups that reached no batch; `position` and `num_batches` as in `Taken`. Raises as `add`."""
        self._wait()
        found = [dead_group(each.index or 0, each.reason, each.producer, each.payload) for each in dead]
        head = BatchHead(
            position=position,
            update=num_batches,
            policy_version=policy_version,
            counts=False,
            time_s=time(),
            skipped_reason=DIED_BEFORE,
            groups=tuple(entry for entry, _ in found),
        )
        batch = encode_batch(head, [recorded for _, recorded in found])
        self._writing = self._thread.submit(self._files.append, batch)

    def sync(self) -> None:
        """Returns once everything is on the disk. Raises OSError if it cannot be written, RunFailedError as `add`."""
        self._wait()
        self._files.sync()

    def close(self) -> None:
        """Writes the rest and ends the thread. Raises nothing, so that it hides no error that ends the run."""
        try:
            if self._writing is not None:
                self._wait()
        except RunFailedError as error:
            log.error("%s", error)
        finally:
            try:
                self._files.close()
            except Exception as error:
                log.error("the record of rollouts is not closed: %s", error)
            finally:
                self._thread.shutdown()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except Exception as error:
                self._failure = RunFailedError(
                    f"a batch cannot be recorded: {type(error).__name__}: {one_line(str(error))}; "
                    "continued with --resume and record = false the run goes on without"
                )
                self._failure.__cause__ = error
        if self._failure is not None:
            raise self._failure

    def _append(self, taken: Taken) -> None:
        self._files.append(encode_batch(*records_of(taken, self._config)))


class RunRecord:
    """Records what the intake hands out and what died there, each at the next position of the run's progress.

    recorder: None of a run without a record. A record of an earlier trainer is continued with `keeps_batches` False: it
        must say where this one went on.
    """

    def __init__(
        self, recorder: RolloutRecorder | None, intake: Intake, progress: RunProgress, *, keeps_batches: bool
    ) -> None:
        self.recorder = recorder
        self._intake = intake
        self._progress = progress
        self._keeps_batches = keeps_batches

    def add(self, groups: Sequence[RolloutGroup], batch: Batch, report: StepReport) -> None:
        """Records a batch, after what died before it. Raises RunFailedError as `RolloutRecorder.add`."""
        self._add_untrained()
        progress = self._progress
        if self.recorder is not None and self._keeps_batches:
            lag_of = self._intake.lag_of
            self.recorder.add(Taken(progress.num_taken, progress.num_batches, groups, batch, report, lag_of))
        progress.num_taken += 1

    def sync(self) -> None:
        """Returns once everything is on the disk. Raises OSError or RunFailedError as `RolloutRecorder.sync`."""
        self._add_untrained()
        if self.recorder is not None:
            self.recorder.sync()

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()

    def _add_untrained(self) -> None:
        died, progress = self._intake.died, self._progress
        if self.recorder is not None and died:
            version = self._intake.lag_of.current
            self.recorder.add_dead(died, progress.num_taken, progress.num_batches, version)
            progress.num_taken += 1
            died.clear()


def records_of(taken: Taken, config: RunConfig) -> tuple[BatchHead, list[RecordedGroup]]:
    """Returns a batch as it is recorded, its groups in order; only the dead ones of a batch that made no update."""
    report = taken.report
    counts = report.skipped_reason in (None, NOTHING_TO_TRAIN)
    groups = [group for group in taken.groups if counts or group.index in report.failed]
    scores = _scores(taken)
    lag = known_lags(taken.lag_of)
    recorded = [_recorded(group, scores, lag, config.lag_bound) for group in groups]
    head = BatchHead(
        position=taken.position,
        update=taken.num_batches + counts,
        policy_version=taken.lag_of.current,
        counts=counts,
        time_s=time(),
        skipped_reason=report.skipped_reason,
        num_optimizer_steps=report.num_optimizer_steps,
        metrics=report.metrics,
        lag_histogram=report.lag_histogram,
        groups=tuple(_entry(group, each, report) for group, each in zip(groups, recorded, strict=True)),
    )
    return head, recorded


_Scores = tuple[bytes, bytes, bytes]
"""Proximal logprobs, importance weights and kept flags of one segment's sampled tokens."""


def _scores(taken: Taken) -> dict[Place, _Scores]:
    """Returns the learner's findings by segment."""
    rollouts = {group.index: group.rollouts for group in taken.groups}
    found: dict[Place, _Scores] = {}
    for n, minibatch in enumerate(taken.batch.minibatches):
        for places, findings in zip(minibatch.places, taken.report.findings.get(n, ()), strict=False):
            columns = (findings.proximal_logprobs, findings.importance_weights, findings.kept)
            proximal, weights, kept = (column.numpy().tobytes() for column in columns)
            start = 0
            for place in places:
                end = start + rollouts[place.group][place.rollout].segments[place.segment].num_sampled_tokens
                found[place] = proximal[4 * start : 4 * end], weights[4 * start : 4 * end], kept[start:end]
                start = end
    return found


def _recorded(group: RolloutGroup, scores: dict[Place, _Scores], lag: KnownLags, lag_bound: int) -> RecordedGroup:
    return RecordedGroup(
        encode_group(group),
        tuple(
            tuple(
                SegmentFindings(span_lags(segment, lag, lag_bound), *scores.get(Place(group.index, r, s), ()))
                for s, segment in enumerate(rollout.segments)
            )
            for r, rollout in enumerate(group.rollouts)
        ),
    )


def _entry(group: RolloutGroup, recorded: RecordedGroup, report: StepReport) -> GroupEntry:
    failure = report.failed.get(group.index, "")
    settled: Outcome = "trained" if report.teaches(group.index) else "skipped"
    segments = [segment for rollout in group.rollouts for segment in rollout.segments]
    findings = [found for of_rollout in recorded.findings for found in of_rollout]
    kept = b"".join(found.kept for found in findings)
    return group_entry(
        group,
        recorded.findings,
        "dead" if failure else "spared" if group.index in report.spared else settled,
        reason=failure,
        advantages=report.advantages[group.index],
        num_masked=sum(segment.num_sampled_tokens for segment in segments) - kept.count(1) if kept else None,
        ess_fraction=_ess_fraction(segments, findings) if kept else None,
        max_weight=_finite(max(unpack_floats(b"".join(f.importance_weights for f in findings)))) if kept else None,
    )


def _ess_fraction(segments: list[Segment], findings: list[SegmentFindings]) -> float | None:
    """Returns (sum w)^2 / (N sum w^2) with w = exp(proximal - behavior), clamped like the correction's."""
    proximal = b"".join(found.proximal_logprobs for found in findings)
    behavior = b"".join(s.behavior_logprobs for s, found in zip(segments, findings, strict=True) if found.kept)
    log_ratio = np.frombuffer(proximal, np.float32).astype(np.float64) - np.frombuffer(behavior, np.float32)
    weights = np.exp(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    return _finite(float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
