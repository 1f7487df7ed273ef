"""Measurements on several ranks: each rank is a process of its own on one torch thread."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from bench.groups import learner_config, random_group
from bench.section import start_apart
from penstock.consumers.distributed.world import World
from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.ranks import Ranks
from penstock.deploy.launch.child import Child
from penstock.schemas.config import ModelConfig, RunConfig

LEARNING_RATE = 1e-4
TIMEOUT_S = 600.0


class RankJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one rank. store: the file through which the ranks meet; both are set by `start_ranks`."""

    num_ranks: int = 1
    rank: int = 0
    store: str = ""

    def open(self) -> Ranks:
        if self.num_ranks == 1:
            return Ranks()
        store = dist.FileStore(self.store, self.num_ranks)
        return World(store, self.rank, self.num_ranks, torch.device("cpu"), TIMEOUT_S)


def start_ranks(
    name: str, function: str, job: RankJob, folder: Path, *, environment: Mapping[str, str] | None = None
) -> list[Child]:
    """Starts a process for each rank; `found_apart(name, ...)` reads what the lead found."""
    store = folder / f"{name}.store"
    store.unlink(missing_ok=True)  # of an earlier round: its addresses are no longer in use
    return [
        start_apart(
            f"{name}, rank {rank}" if rank else name,
            function,
            msgspec.structs.replace(job, rank=rank, store=str(store)),
            folder,
            environment=environment,
        )
        for rank in range(job.num_ranks)
    ]


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


class OnRanks(RankJob, frozen=True, kw_only=True):
    """Batches trained on several ranks, after one that does not count."""

    model: str
    work: Work
    steps: int
    by_expert: bool = False
    loops_over_experts: bool = False


def on_ranks(job: OnRanks) -> list[float]:
    """Wall seconds of each step, on the lead; the other ranks do not return."""
    ranks = job.open()
    learner = Learner(_config(job.model, job.work, by_expert=job.by_expert), ranks)
    if job.loops_over_experts:
        learner.model.module.set_experts_implementation("eager")
    if not ranks.is_lead:
        ranks.follow(learner.orders | {"end": sys.exit})
    batch = _batch(learner, job.work)
    learner.step(batch)
    seconds = []
    for _ in range(job.steps):
        began = time.perf_counter()
        learner.step(batch)
        seconds.append(time.perf_counter() - began)
    ranks.order("end")
    return seconds


def _config(model: str, work: Work, *, by_expert: bool) -> RunConfig:
    return learner_config(
        ModelConfig(path=model),
        device="cpu",
        learning_rate=LEARNING_RATE,
        tokens_per_microbatch=work.tokens_per_pass,
        expert_parallel=by_expert,
    )


def _batch(learner: Learner, work: Work) -> Batch:
    lengths = [work.sampled_tokens] * work.group_size
    groups = [
        random_group(index, lengths, learner.vocabulary, prompt_tokens=work.prompt_tokens)
        for index in range(work.num_groups)
    ]
    return learner.pack(groups, lambda version: 0)
