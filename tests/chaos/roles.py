"""Programs of the suite's processes: the real entry points, observed, and the deliberately broken protocols."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import penstock.consumers.__main__ as trainer_entry
import penstock.consumers.stream.recovery as recovery
import penstock.consumers.trainer as trainer
import penstock.producers.__main__ as producer_entry
from penstock.consumers.checkpoints.state import LedgerState, ReleasedTask
from penstock.consumers.learning.batch.batch import MiniBatch
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.release import Releaser
from penstock.producers.interfaces import NO_IMAGES, Completion, PlacedImages
from penstock.schemas.config import RunConfig
from penstock.schemas.process import logs
from penstock.schemas.rollout import SamplingSettings
from scripted_engine import ScriptedEngine
from tests.chaos.witness import observed_learner


def train(config: RunConfig, runs: Path, *, resume: bool, standby: bool, steps: Path, broken: str | None = None) -> int:
    """Runs the trainer's own entry point with an observed learner."""
    logs.configure("trainer", run=config.name, id=f"trainer-{os.getpid()}")
    trainer_entry.Learner = observed_learner(steps)  # type: ignore[misc]
    shorten_waits()
    if broken is not None:
        BROKEN[broken]()
    return trainer_entry.main(config, runs=runs, resume=resume, standby=standby)


def shorten_waits() -> None:
    """Makes a trainer suspect its chunks after seconds: a run with steps of milliseconds waits no longer."""
    trainer.WAITING_LOG_S, recovery.SUSPICIOUS_S = 1.0, 3.0


def produce(config: RunConfig, runs: Path, producer_id: str) -> int:
    """Runs the producer's own entry point with a scripted engine."""

    async def start(config: RunConfig, *, seed: int) -> ChaosEngine:
        settings = {"num_tokens": config.sampling.max_tokens, "num_token_ids": 90, "first_token": 3}
        return ChaosEngine(token_s=0.005, **settings)

    return producer_entry.main(config, runs=runs, producer_id=producer_id, engine_factory=start)


class ChaosEngine(ScriptedEngine):
    """An engine that refuses a request id while it is in use, but not afterwards."""

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        stop: Sequence[str] = (),
        seed: int | None = None,
        images: PlacedImages = NO_IMAGES,
    ) -> list[Completion]:
        try:
            return await super().generate(prompt_token_ids, sampling, num_siblings, request_id, stop, seed, images)
        finally:
            if not isinstance(sys.exc_info()[1], ValueError):
                self.requests.remove(request_id)


def _without_reconciling() -> None:
    """Does not release again the indexes that Redis has lost."""

    def reconcile(self, reader, lag_of, *rest):
        reader.read_to_end(lag_of)
        return 0

    Releaser.reconcile = reconcile  # type: ignore[method-assign]


def _with_forgotten_ledger() -> None:
    """Makes a resumed trainer restore the policy without the record of what it was trained on."""
    from_state = Ledger.from_state

    def forget(state: LedgerState) -> Ledger:
        ledger = from_state(state)
        fresh = Ledger()
        fresh.num_released, fresh.histories = ledger.num_released, ledger.histories
        (environment,) = ledger.histories
        fresh.tasks = {index: ReleasedTask(environment, index) for index in range(1, ledger.num_released + 1)}
        return fresh

    Ledger.from_state = staticmethod(forget)  # type: ignore[method-assign]


def _without_sharing() -> None:
    """Gives every rank the rows of all."""
    of_rank = MiniBatch.of_rank

    def with_all(self: MiniBatch, rank: int, num_ranks: int) -> MiniBatch:
        return replace(of_rank(self, rank, num_ranks), microbatches=self.microbatches)

    MiniBatch.of_rank = with_all  # type: ignore[method-assign]


BROKEN: dict[str, Callable[[], None]] = {
    "reconciling": _without_reconciling,
    "ledger": _with_forgotten_ledger,
    "sharing": _without_sharing,
}
