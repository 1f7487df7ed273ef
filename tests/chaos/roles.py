"""Programs of the suite's processes: the real entry points, observed, and the deliberately broken protocols."""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

import penstock.consumers.__main__ as trainer_entry
import penstock.consumers.stream.recovery as recovery
import penstock.consumers.trainer as trainer
import penstock.producers.__main__ as producer_entry
import penstock.producers.loop as loop
import penstock.producers.weights.host_copy as host_copy
from penstock.consumers.learning.batch import MiniBatch
from penstock.consumers.stream.intake import Intake
from penstock.consumers.stream.ledger import Ledger, ReleasedTask
from penstock.consumers.stream.reader import Reader
from penstock.consumers.stream.release import Releaser
from penstock.producers.interfaces import Completion, Restore
from penstock.producers.stream.rollout_progress import RolloutProgress
from penstock.schemas.config import RunConfig
from penstock.schemas.policy import WeightManifest
from penstock.schemas.process import logs
from penstock.schemas.rollout import SamplingSettings
from scripted_engine import ScriptedEngine
from tests.chaos import labels
from tests.chaos.losses import GRACE_S, TOKEN_S
from tests.chaos.tally import Tally, parts_of
from tests.chaos.witness import observed_learner
from weight_host import read

SAMPLED = "sampled"
"""The folder of the tallies of a leg of long rollouts, one for each process by its number."""
LONGEST = 240
"""The tokens of the longest rollouts there; the shortest have half as many."""
WITHOUT_PROGRESS = "progress"
"""The broken protocol of producers that save no progress."""
KILL_IN_PATCH = "kill-in-patch"
"""The file that the suite leaves for the next producer that patches a host's copy: it dies during the patch."""


def train(config: RunConfig, runs: Path, *, resume: bool, standby: bool, steps: Path, broken: str | None = None) -> int:
    """Runs the trainer's own entry point with an observed learner."""
    logs.configure("trainer", run=config.name, id=f"trainer-{os.getpid()}")
    trainer_entry.Learner = observed_learner(steps)  # type: ignore[misc]
    labels.watch_publications(steps.with_name("labels"))
    shorten_waits()
    if broken is not None and broken != WITHOUT_PROGRESS:
        BROKEN[broken]()
    return trainer_entry.main(config, runs=runs, resume=resume, standby=standby)


def shorten_waits() -> None:
    """Makes a trainer suspect its chunks after seconds: a run with steps of milliseconds waits no longer."""
    trainer.WAITING_LOG_S, recovery.SUSPICIOUS_S = 1.0, 3.0


def produce(
    config: RunConfig,
    runs: Path,
    producer_id: str,
    token_s: float,
    number: int | None = None,
    broken: str | None = None,
) -> int:
    """Runs the producer's own entry point with a scripted engine. number: of this process among all, if rollouts are
    long and each process keeps a tally of its tokens."""

    async def start(config: RunConfig, *, seed: int) -> ChaosEngine:
        settings = {"num_tokens": config.sampling.max_tokens, "num_token_ids": 90, "first_token": 3}
        if number is None:
            return ChaosEngine(runs.parent / "labels", token_s=token_s, **settings)
        return LongEngine(runs.parent / "labels", Tally(runs.parent / SAMPLED, number), token_s=TOKEN_S)

    if number is not None:
        loop.GRACE_S = GRACE_S
    if broken == WITHOUT_PROGRESS:
        RolloutProgress.save = _save_nothing  # type: ignore[method-assign]
    aim, apply = runs.parent / KILL_IN_PATCH, host_copy.apply

    def apply_and_die(*arguments: Any) -> None:
        apply(*arguments)
        if aim.exists():
            aim.rename(aim.with_suffix(f".{os.getpid()}"))
            os.kill(os.getpid(), signal.SIGKILL)

    host_copy.apply = apply_and_die  # type: ignore[assignment]
    return producer_entry.main(config, runs=runs, producer_id=producer_id, engine_factory=start)


class ChaosEngine(ScriptedEngine):
    """An engine that refuses a request id while it is in use, but not afterwards, and records in `notes` what it
    loads."""

    def __init__(self, notes: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self._notes = notes

    async def load_weights(self, manifest: WeightManifest, path: str, restore: Restore | None = None) -> float:
        found = await asyncio.to_thread(lambda: labels.digest(read(path)))
        labels.note(self._notes, "held", manifest.version, found)
        return await super().load_weights(manifest, path, restore)

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Completion]:
        try:
            return await super().generate(prompt_token_ids, sampling, num_siblings, request_id, stop, seed)
        finally:
            if not isinstance(sys.exc_info()[1], ValueError):
                self.requests.remove(request_id)


class LongEngine(ChaosEngine):
    """An engine whose rollouts have `LONGEST` tokens or fewer, by index, and which keeps a tally of them."""

    def __init__(self, notes: Path, tally: Tally, **settings: Any) -> None:
        super().__init__(notes, script=lambda prompt, sibling: [tally.mark] * _num_left(prompt), **settings)
        self._tally = tally

    async def generate(self, prompt_token_ids: list[int], sampling: SamplingSettings, *rest: Any) -> list[Completion]:
        num_siblings, request_id, *_ = rest
        num_wanted = min(_num_left(prompt_token_ids), sampling.max_tokens)
        self._tally.begin(request_id, parts_of(prompt_token_ids)[0], num_siblings, num_wanted)
        return await super().generate(prompt_token_ids, sampling, *rest)

    def stepped(self, request_id: str, num_sampled: int) -> None:
        self._tally.step(request_id, num_sampled)


def _num_left(prompt: list[int]) -> int:
    """Returns the number of tokens that are missing in the rollout that a prompt begins."""
    index, num_sampled = parts_of(prompt)
    return LONGEST - 30 * (index % 5) - num_sampled


async def _save_nothing(self: RolloutProgress, min_age_s: float = 0.0) -> float:
    return 0.0


def _without_deduplication() -> None:
    """Accepts every record that arrives, settled before or not, and trains it each time.

    Which records come twice, and soon enough not to be stale, is a matter of chance: so a trainer that waits reads the
    stream from its start every time, and nothing counts as stale.
    """
    read, receive, settle = Reader.read, Reader._receive, Ledger.settle

    class Nothing:
        def __contains__(self, index: int) -> bool:
            return False

    @functools.wraps(read)
    def read_again(self, lag_of, *, block):
        if block:
            self.rewind()
        return read(self, lag_of, block=block)

    @functools.wraps(receive)
    def receive_all(self, entry_id, fields, lag_of):
        settled, self._ledger.settled = self._ledger.settled, Nothing()
        try:
            receive(self, entry_id, fields, lag_of)
        finally:
            self._ledger.settled = settled

    @functools.wraps(settle)
    def settle_again(self, index, *rest, **more):
        if index not in self.settled:
            settle(self, index, *rest, **more)

    Intake._postpone_stale = lambda self: None  # type: ignore[method-assign]
    Reader.read = read_again  # type: ignore[method-assign]
    Reader._receive = receive_all  # type: ignore[method-assign]
    Ledger.settle = settle_again  # type: ignore[method-assign]


def _without_reconciling() -> None:
    """Does not release again the indexes that Redis has lost."""

    def reconcile(self, reader, lag_of, *rest):
        reader.read_to_end(lag_of)
        return 0

    Releaser.reconcile = reconcile  # type: ignore[method-assign]


def _with_forgotten_ledger() -> None:
    """Makes a resumed trainer restore the policy without the record of what it was trained on."""
    from_state = Ledger.from_state

    def forget(state: dict) -> Ledger:
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
    "deduplication": _without_deduplication,
    "reconciling": _without_reconciling,
    "ledger": _with_forgotten_ledger,
    "sharing": _without_sharing,
}


def engine_command(config: Path, runs: Path, producer_id: str) -> list[str]:
    """Returns the command of a producer with the real engine."""
    return [sys.executable, "-m", "tests.chaos.roles", str(config), str(runs), producer_id]


def main() -> int:
    """Runs the program that `engine_command` starts."""
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RunConfig)
    os.environ["OMP_NUM_THREADS"] = str(config.producers.num_threads)
    return producer_entry.main(config, runs=Path(sys.argv[2]), producer_id=sys.argv[3])


if __name__ == "__main__":
    sys.exit(main())
