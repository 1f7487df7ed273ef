"""Commits: a checkpoint is written during training, and only then is the stream acknowledged up to it."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from penstock.consumers.checkpoints.checkpoints import CheckpointWriteError, rng_state
from penstock.consumers.checkpoints.schedule import CommitSchedule
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership
from penstock.consumers.stream.ledger import RunFailedError
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.keys import entry_key

PUBLISHED_S = 10.0
"""How long a commit waits for the policies of its batches to be announced, in a run with traces: a committed group has
a complete one."""


class Traces(Protocol):
    """See `penstock.consumers.observe.traces.GroupTraces`."""

    @property
    def is_complete(self) -> bool: ...

    def snapshot(self) -> None: ...

    def commit(self, wait_s: float) -> None: ...


class Snapshot(NamedTuple):
    """A checkpoint that is being written, and the run's position when it was taken."""

    writing: Future[str]
    num_batches: int
    num_settled: int
    num_released: int
    keep_rollouts: bytes
    began_s: float
    took_s: float


class Committed(NamedTuple):
    """A checkpoint that Redis points to."""

    name: str
    num_batches: int
    num_trimmed: int
    """Stream entries before the first one that is not settled in the checkpoint."""
    took_s: float
    """Since the snapshot."""
    snapshot_s: float
    """How long the snapshot blocked training."""


class Commits:
    """Commits the state of the run: the learner's state, the ledger, the versions and the counts.

    `begin` takes a snapshot, which a thread writes; `complete` makes Redis point to it. Batches trained in between are
    acknowledged by the next commit: after a crash in between, streams and Redis still match the previous checkpoint.

    traces: of the groups that a checkpoint settles.
    sync_record: returns once the record of rollouts is on disk; raises OSError or RunFailedError.
    """

    def __init__(
        self,
        leadership: Leadership,
        learner: Learner,
        intake: Intake,
        progress: RunProgress,
        every: int,
        sync_record: Callable[[], None],
        traces: Traces,
    ) -> None:
        self.schedule = CommitSchedule(leadership.scripts.connection.memory_share, every)
        self._leadership = leadership
        self._learner = learner
        self._intake = intake
        self._progress = progress
        self._sync_record = sync_record
        self._traces = traces
        self._snapshot: Snapshot | None = None
        self._num_released = 0
        """The release cursor of the previous checkpoint, which is used if the newest one is torn."""

    def is_due(self, *, busy: bool) -> bool:
        """See `CommitSchedule.is_due`; False while a checkpoint is being written."""
        return self._snapshot is None and self.schedule.is_due(
            self._progress.num_batches, len(self._intake.ledger.settled), busy=busy
        )

    def begin(self) -> None:
        """Takes a snapshot of the run and starts to write it. No other checkpoint may be being written.

        Raises:
            CheckpointWriteError: nothing has changed.
        """
        began_s = time.monotonic()
        try:
            self._sync_record()
        except (OSError, RunFailedError) as error:
            raise CheckpointWriteError(f"no checkpoint: the record of rollouts cannot be written: {error}") from error
        self._traces.snapshot()
        self._snapshot = Snapshot(
            writing=self._leadership.checkpoints.begin(self._learner, self._state()),
            num_batches=self._progress.num_batches,
            num_settled=len(self._intake.ledger.settled),
            num_released=self._intake.ledger.num_released,
            keep_rollouts=self._intake.reader.first_unsettled(),
            began_s=began_s,
            took_s=time.monotonic() - began_s,
        )

    def complete(self, *, wait: bool) -> Committed | None:
        """Commits the checkpoint that is on disk by now, and deletes older ones; returns None if there is none.

        With `wait`, waits for one that is being written; the disk unblocks it.

        Raises:
            CheckpointWriteError: it could not be written; nothing has changed.
        """
        snapshot = self._snapshot
        if snapshot is None or not (wait or snapshot.writing.done()):
            return None
        overdue = time.monotonic() > snapshot.began_s + PUBLISHED_S
        if not (wait or self._traces.is_complete or overdue):
            return None
        self._snapshot = None
        name = snapshot.writing.result()
        self._traces.commit(PUBLISHED_S if wait else 0.0)
        leadership, reader = self._leadership, self._intake.reader
        # A server that was emptied meanwhile and whose clock is behind reuses ids, and not all were read yet.
        keep_rollouts = min(snapshot.keep_rollouts, reader.first_unsettled(), key=entry_key)
        # If this is fenced, the checkpoint stays: an earlier try, its reply lost, may have committed it, and the
        # successor may continue from it. If it does not, its next commit deletes the checkpoint.
        images = reader.images_before(keep_rollouts)
        trimmed = leadership.scripts.commit(name, keep_rollouts, self._num_released, images)
        self._num_released = snapshot.num_released
        leadership.checkpoints.committed(name)
        reader.forget_trimmed(keep_rollouts)
        took_s = time.monotonic() - snapshot.began_s
        self.schedule.committed(snapshot.num_batches, snapshot.num_settled, took_s)
        return Committed(name, snapshot.num_batches, trimmed, took_s, snapshot.took_s)

    def abandon(self) -> None:
        """Discards the checkpoint that is being written: see `Checkpoints.abandon`."""
        self._leadership.checkpoints.abandon()

    def _state(self) -> CheckpointState:
        lag_of, progress = self._intake.lag_of, self._progress
        return CheckpointState(
            policy_version=lag_of.current,
            num_batches=progress.num_batches,
            ledger=self._intake.ledger.to_state(),
            forks=lag_of.forks,
            announced={**lag_of.announced, progress.epoch: lag_of.current},
            counters=progress.totals,
            learner=self._learner.state(),
            rng=rng_state(),
            taken=progress.taken,
            passed=progress.passed,
            skipped_share=progress.skipped_share,
            best=progress.best,
        )
