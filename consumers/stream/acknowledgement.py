"""Commits: a checkpoint is written, and only then is the stream acknowledged up to it."""

import time
from collections.abc import Callable

from penstock.consumers.learning.learner import Learner
from penstock.consumers.stream.checkpoints import CheckpointState, CheckpointWriteError, rng_state
from penstock.consumers.stream.commit_schedule import CommitSchedule
from penstock.consumers.stream.evaluation import Evaluator
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.leadership import Leadership
from penstock.consumers.stream.progress import RunProgress
from penstock.consumers.stream.settlement import RunFailedError


class Commits:
    """Commits the state of the run: the learner's, the ledger, the versions and the counts.

    sync_record: returns once the record of rollouts is on the disk; raises OSError or RunFailedError.
    """

    def __init__(
        self,
        leadership: Leadership,
        learner: Learner,
        intake: Intake,
        evaluator: Evaluator,
        progress: RunProgress,
        every: int,
        sync_record: Callable[[], None],
    ) -> None:
        self.schedule = CommitSchedule(leadership.connection, every)
        self._leadership = leadership
        self._learner = learner
        self._intake = intake
        self._evaluator = evaluator
        self._progress = progress
        self._sync_record = sync_record

    def is_due(self, *, busy: bool) -> bool:
        """See `CommitSchedule.is_due`."""
        return self.schedule.is_due(self._progress.num_batches, len(self._intake.ledger.settled), busy=busy)

    def commit(self) -> tuple[str, int]:
        """Returns the checkpoint's name and the number of stream entries trimmed: those before the first that is not
        settled in it.

        Raises:
            CheckpointWriteError: nothing has changed.
        """
        began_s = time.monotonic()
        leadership, reader, checkpoints = self._leadership, self._intake.reader, self._leadership.checkpoints
        try:
            self._sync_record()
        except (OSError, RunFailedError) as error:
            raise CheckpointWriteError(f"no checkpoint: the record of rollouts cannot be written: {error}") from error
        state = self._state()
        name = checkpoints.write(self._learner, state)
        keep_rollouts, keep_results = reader.first_unsettled(), self._evaluator.first_needed()
        # If this is fenced, the checkpoint stays: an earlier try, its reply lost, may have committed it, and the
        # successor may continue from it. If it does not, its next commit deletes the checkpoint.
        trimmed = leadership.connection.call(
            lambda _: leadership.scripts.commit(leadership.epoch, name, keep_rollouts, keep_results)
        )
        checkpoints.committed(name)
        reader.forget_trimmed()
        took_s = time.monotonic() - began_s
        self.schedule.committed(self._progress.num_batches, len(self._intake.ledger.settled), took_s)
        return name, trimmed

    def _state(self) -> CheckpointState:
        lag_of, progress = self._intake.lag_of, self._progress
        return CheckpointState(
            policy_version=lag_of.current,
            num_batches=progress.num_batches,
            ledger=self._intake.ledger.to_state(),
            forks=lag_of.forks,
            announced={**lag_of.announced, progress.epoch: lag_of.current},
            counters=progress.totals,
            rng=rng_state(),
            taken=progress.taken,
        )
