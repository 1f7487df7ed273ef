"""A learner without a model that records its batches, for tests of the protocol around it."""

import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from penstock.consumers.learning.batch.batch import Batch, MiniBatch
from penstock.consumers.learning.batch.lag import Lags
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN, StepReport
from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import RunConfig
from penstock.schemas.process.files import digest
from penstock.schemas.rollout import RolloutGroup, Segment

FILE = "trained.json"
"""The only tensor file of its checkpoints."""


class KilledError(Exception):
    """Simulates kill -9: nothing is written after it."""


class ScriptedLearner:
    """A learner that counts steps; its only weight is the number of steps taken.

    `trained` lists the indexes in the order in which they were trained. It is saved and loaded with the model, so after
    a resume it holds what the saved policy was trained on. `fail_at` maps a step to the reason why it is skipped, or to
    an exception to raise, and -1 - n to one in step n of a warm start; once `fails_from` steps were taken, every
    further one fails. Indexes in `never_finite` fail while the rest of their batch is trained.
    """

    vocabulary = 100
    experts: tuple[int, int, int] | None = None
    sees = None
    trains_every_row = False

    def __init__(self, config: RunConfig, ranks: Ranks | None = None) -> None:
        self.config = config
        self.ranks = ranks or Ranks()
        self.num_steps = self.num_warm_steps = 0
        self.trained: list[int] = []
        self.lags: list[dict[int, int]] = []
        self.fail_at: dict[int, str | BaseException] = {}
        self.fails_from: int | None = None
        self.never_finite: set[int] = set()
        self.more_weights: dict[str, torch.Tensor] = {}
        self.before_update: Callable[[], object] = lambda: None

    def pack(self, groups: Sequence[RolloutGroup], lag_of: Lags) -> Batch:
        return pack(groups, lag_of, self.config, every_row=self.trains_every_row)

    def step(self, batch: Batch) -> StepReport:
        failure = self.fail_at.pop(self.num_steps, None)
        if self.fails_from is not None and self.num_steps >= self.fails_from:
            failure = "loss is not finite"
        if isinstance(failure, BaseException):
            raise failure
        skipped = failure or (None if batch.num_tokens_trained else NOTHING_TO_TRAIN)
        if skipped is None:
            self.before_update()
            self.num_steps += 1
            self.trained += [index for index in batch.indexes if index not in self.never_finite]
            self.lags.append(batch.lag_histogram)
        return StepReport(
            metrics={**batch.outcome, "loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0},
            lag_histogram=batch.lag_histogram,
            num_tokens_trained=batch.num_tokens_trained,
            num_tokens_masked_lag=batch.num_tokens_masked_lag,
            advantages=batch.group_advantages,
            skipped_reason=skipped,
            steps_skipped={skipped: 1} if skipped else {},
            failed=dict.fromkeys(batch.indexes, failure)
            if failure
            else dict.fromkeys(self.never_finite & set(batch.indexes), "loss is not finite"),
        )

    def pack_demonstrations(self, demonstrations: Sequence[Segment]) -> MiniBatch:
        return MiniBatch(microbatches=(), indexes=(), num_tokens=len(demonstrations), num_rollouts=len(demonstrations))

    def warm_step(self, minibatch: MiniBatch) -> tuple[float, float]:
        if failure := self.fail_at.pop(-1 - self.num_warm_steps, None):
            assert isinstance(failure, BaseException)
            raise failure
        self.num_warm_steps += 1
        return 1 / self.num_warm_steps, 1.0

    def published_parts(self) -> Callable[[], list[PublishedPart]]:
        weights = {"steps": torch.tensor([float(self.num_steps + self.num_warm_steps)]), **self.more_weights}
        return lambda: [
            PublishedPart(name, tensor.dtype, tuple(tensor.shape), 0, tensor.reshape(-1))
            for name, tensor in weights.items()
        ]

    def follow_versions(self, policies: Callable[[int], object]) -> None:
        pass

    def state(self) -> dict:
        return {"num_steps": self.num_steps, "num_warm_steps": self.num_warm_steps}

    def begin_checkpoint(self, folder: Path) -> Future[dict[str, str]]:
        written: Future[dict[str, str]] = Future()
        try:
            written.set_result(self.write(folder))
        except Exception as error:
            written.set_exception(error)
        return written

    def write(self, folder: Path) -> dict[str, str]:
        folder.mkdir()
        (folder / FILE).write_text(json.dumps(self.trained))
        return {FILE: digest(folder / FILE)}

    def load_checkpoint(self, folder: Path, state: dict) -> None:
        self.num_steps, self.num_warm_steps = state["num_steps"], state["num_warm_steps"]
        self.trained = json.loads((folder / FILE).read_text())

    @staticmethod
    def export(tensors: Path, config: Path, folder: Path, dtype: str) -> None:
        shutil.copytree(tensors, folder)
