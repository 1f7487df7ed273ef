"""Trains a tiny model on random groups and records it as a trainer does, without Redis or an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.consumers.checkpoints.checkpoints import Checkpoints
from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import StepReport
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.observe.record import RolloutRecorder, Taken
from penstock.schemas.config import RunConfig, TrainerConfig
from penstock.schemas.policy import make_version
from training_groups import configuration, random_group

FIRST_VERSION = 7
"""The newest of the versions of `random_group`, 3 to 7."""
GROUPS = 3


def settings(model: Path, **changes: Any) -> RunConfig:
    """Returns a configuration with two optimizer steps per batch, during the warm-up of the learning rate."""
    trainer = TrainerConfig(device="cpu", learning_rate=5e-3, num_minibatches=2, warmup_steps=5)
    return configuration(model, **{"record": True, "groups_per_batch": GROUPS, "trainer": trainer, **changes})


class RecordedTraining:
    """A recorded training; `train` may be called again as after a resume, for another epoch with other settings."""

    def __init__(self, folder: Path, model: Path, ranks: Ranks | None = None) -> None:
        self.folder, self.model, self.ranks = folder, model, ranks or Ranks()
        self.reports: list[StepReport] = []
        self.checkpoints: list[str] = []
        self._taken: dict[int, int] = {}
        self._epoch = 0
        self._learner: Learner | None = None

    def train(
        self,
        num_updates: int,
        *,
        config: RunConfig | None = None,
        seeds: Sequence[int] = (),
        num_ranks: int | None = None,
    ) -> None:
        """Trains and records updates, and writes a checkpoint.

        seeds: of each update's groups, by default its number. num_ranks: a wrong number of ranks for the record.
        """
        config = config or settings(self.model)
        learner = Learner(config, self.ranks)
        if self._learner is not None:
            self._learner.begin_checkpoint(self.folder / "handed-on").result()
            learner.load_checkpoint(self.folder / "handed-on", self._learner.state())
        forks = dict.fromkeys(range(1, self._epoch + 1), FIRST_VERSION)
        current = make_version(self._epoch, 0) if self._epoch else FIRST_VERSION
        lag_of = LagTable(current, forks, {0: FIRST_VERSION})
        recorder = RolloutRecorder(config, self.folder, self._epoch, self._taken, lag_of, num_ranks or self.ranks.size)
        position = max(self._taken.values(), default=0)
        for update in range(position, position + num_updates):
            seed = seeds[update - position] if seeds else update
            groups = [random_group(GROUPS * update + n + 1, seed) for n in range(GROUPS)]
            batch = learner.pack(groups, lag_of)
            self.reports.append(learner.step(batch))
            recorder.add(Taken(update, update, groups, batch, self.reports[-1], lag_of))
        recorder.sync()
        recorder.close()
        self._taken = {**self._taken, self._epoch: position + num_updates}
        state = CheckpointState(
            policy_version=lag_of.current,
            num_batches=position + num_updates,
            forks={},
            announced={},
            counters={},
            taken=self._taken,
            learner=learner.state(),
        )
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        self.checkpoints.append(Checkpoints(self.folder / "checkpoints", 2).begin(learner, state).result())
        self._epoch += 1
        self._learner = learner
        assert all(report.metrics["loss"] for report in self.reports), "a step without a loss would show nothing"

    @property
    def losses(self) -> list[float]:
        return [report.metrics["loss"] for report in self.reports]
