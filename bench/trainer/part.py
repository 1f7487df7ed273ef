"""`python -m bench.trainer.part JOB.json RANK`: one process of the trainer section; the lead writes `JOB.result`."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from bench.result import in_turns
from bench.section import ONE_THREAD, wait_for
from bench.trainer.groups import random_group
from bench.trainer.plain import PlainLoop
from penstock.consumers.distributed.world import World
from penstock.consumers.learning.batch import Batch
from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.deploy.launch.child import Child
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig, TrainerConfig

RANKS_TIMEOUT_S = 300.0
LEARNING_RATE = 1e-4
"""Ten steps move the weights by several percent, so that ranks which disagree come apart."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of one batch; all rollouts are of one length. tokens_per_pass: as `trainer.tokens_per_microbatch`."""

    num_groups: int
    group_size: int
    prompt_tokens: int
    sampled_tokens: int
    tokens_per_pass: int

    @property
    def num_tokens(self) -> int:
        """Sampled ones of a batch."""
        return self.num_groups * self.group_size * self.sampled_tokens


class AgainstPlain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The learner and the plain loop on the same batch, `steps` of each a round, in turns in one process.

    compiled: the learner with `trainer.compile`, and in the plain loop's place the learner without.
    """

    model: str
    work: Work
    rounds: int
    steps: int
    compiled: bool = False


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """By round, of all its steps. seconds: processor time on one thread, which other load hardly lengthens."""

    seconds: dict[str, list[float]]
    wall_seconds: dict[str, list[float]]
    diagnostics_share: float
    """Of the learner's wall time in the last round."""
    weights_apart: float
    """The largest relative difference of a parameter between the two after the first step of each."""


class OnRanks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Batches trained on several ranks, after one that does not count. weights: the file for those at the end."""

    model: str
    work: Work
    num_ranks: int
    steps: int
    weights: str | None = None


Job = AgainstPlain | OnRanks


def run_parts(name: str, jobs: Sequence[Job], result_type: Any, folder: Path) -> list[Any]:
    """Runs jobs side by side, each rank in a process of its own on one torch thread, and returns what they found.

    Raises:
        BenchError: a process failed, or took too long.
    """
    children, files = [], []
    for number, job in enumerate(jobs):
        file = folder / f"{name}-{number}.json"
        file.write_bytes(msgspec.json.encode(job))
        _store(file).unlink(missing_ok=True)  # of the round before: its addresses are nobody's any more
        files.append(file)
        for rank in range(job.num_ranks if isinstance(job, OnRanks) else 1):
            command = [sys.executable, "-m", "bench.trainer.part", str(file), str(rank)]
            log = folder / f"{name}-{number}-{rank}.log"
            children.append(Child(f"{name}, rank {rank}", command, log=log, environment=ONE_THREAD))
    wait_for(children)
    return [msgspec.json.decode(_result(file).read_bytes(), type=result_type) for file in files]


def main() -> None:
    file, rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    job = msgspec.json.decode(file.read_bytes(), type=Job)
    if isinstance(job, AgainstPlain):
        found: Timed | list[float] = against_plain(job)
    else:
        ranks = Ranks()
        if job.num_ranks > 1:
            store = dist.FileStore(str(_store(file)), job.num_ranks)
            ranks = World(store, rank, job.num_ranks, torch.device("cpu"), RANKS_TIMEOUT_S)
        found = on_ranks(job, ranks)
    _result(file).write_bytes(msgspec.json.encode(found))


def _store(job_file: Path) -> Path:
    return job_file.with_suffix(".store")


def _result(job_file: Path) -> Path:
    return job_file.with_suffix(".result")


def against_plain(job: AgainstPlain) -> Timed:
    config = _config(job.model, job.work)
    learner = Learner(replace(config, trainer=replace(config.trainer, compile=job.compiled)))
    other: Any = Learner(config) if job.compiled else PlainLoop(Path(job.model), config)
    batch = _batch(learner, job.work)
    report = learner.step(batch)
    other.step(batch)
    weights_apart = _weights_apart(learner.model.module, other.model.module if job.compiled else other.module)
    wall: dict[str, list[float]] = {"learner": [], "plain": []}

    def timed(name: str, step: Callable[[Batch], Any]) -> Callable[[], float]:
        def seconds() -> float:
            nonlocal report
            began, wall_began = time.process_time(), time.perf_counter()
            for _ in range(job.steps):
                report = step(batch) or report
            wall[name].append(time.perf_counter() - wall_began)
            return time.process_time() - began

        return seconds

    seconds = in_turns(job.rounds, {"learner": timed("learner", learner.step), "plain": timed("plain", other.step)})
    phases = report.phase_s
    return Timed(
        seconds=seconds,
        wall_seconds=wall,
        diagnostics_share=phases.get("diagnostics", 0.0) / sum(phases.values()),
        weights_apart=weights_apart,
    )


def on_ranks(job: OnRanks, ranks: Ranks) -> list[float]:
    """Wall seconds of each step, on the lead; the other ranks do not return."""
    learner = Learner(_config(job.model, job.work), ranks)
    if not ranks.is_lead:
        ranks.follow(learner.orders | {"end": sys.exit})
    batch = _batch(learner, job.work)
    learner.step(batch)
    seconds = []
    for _ in range(job.steps):
        began = time.perf_counter()
        learner.step(batch)
        seconds.append(time.perf_counter() - began)
    if job.weights is not None:
        torch.save(learner.published_weights(), job.weights)
    ranks.order("end")
    return seconds


def _config(model: str, work: Work) -> RunConfig:
    trainer = TrainerConfig(
        device="cpu", num_threads=1, learning_rate=LEARNING_RATE, tokens_per_microbatch=work.tokens_per_pass
    )
    return RunConfig(
        name="bench", model=ModelConfig(path=model), environment=EnvironmentConfig(path="none:None"), trainer=trainer
    )


def _batch(learner: Learner, work: Work) -> Batch:
    lengths = [work.sampled_tokens] * work.group_size
    groups = [
        random_group(index, lengths, learner.vocabulary, prompt_tokens=work.prompt_tokens)
        for index in range(work.num_groups)
    ]
    return learner.pack(groups, lambda version: 0)


def _weights_apart(first: torch.nn.Module, second: torch.nn.Module) -> float:
    others = dict(second.named_parameters())
    return max(relative_difference(p.detach(), others[name].detach()) for name, p in first.named_parameters())


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


if __name__ == "__main__":
    main()
