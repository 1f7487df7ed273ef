"""What the trainer records of its batches, and of the groups that reached none."""

from collections.abc import Sequence

from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.observe.record import RolloutRecorder, Taken
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.rollout import RolloutGroup


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
