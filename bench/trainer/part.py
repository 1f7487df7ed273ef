"""The measuring processes of the trainer section."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from bench.groups import learner_config, random_group
from bench.result import in_turns
from bench.trainer.plain import PlainLoop
from bench.trainer.ranks import RankJob
from penstock.consumers.learning.batch import Batch
from penstock.consumers.learning.learner import Learner
from penstock.schemas.config import ModelConfig, RunConfig

LEARNING_RATE = 1e-4


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


class AgainstPlain(msgspec.Struct, frozen=True, kw_only=True):
    """The learner and the plain loop on the same batch, `steps` of each a round, in turns in one process.

    compiled: the learner with `trainer.compile`, and in the plain loop's place the learner without.
    """

    model: str
    work: Work
    rounds: int
    steps: int
    compiled: bool = False


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """By round, of all its steps: processor seconds on one thread, which other load hardly lengthens.

    diagnostics_share: of the learner's last step. weights_apart: the largest relative difference of a parameter between
        the two after the first step of each.
    """

    learner: list[float]
    plain: list[float]
    diagnostics_share: float
    weights_apart: float


class OnRanks(RankJob, frozen=True, kw_only=True):
    """Batches trained on several ranks, after one that does not count."""

    model: str
    work: Work
    steps: int


def against_plain(job: AgainstPlain) -> Timed:
    config = _config(job.model, job.work)
    learner = Learner(replace(config, trainer=replace(config.trainer, compile=job.compiled)))
    other: Any = Learner(config) if job.compiled else PlainLoop(Path(job.model), config)
    batch = _batch(learner, job.work)
    learner.step(batch)
    other.step(batch)
    weights_apart = _weights_apart(learner.model.module, other.model.module if job.compiled else other.module)

    def seconds(step: Callable[[Batch], Any]) -> float:
        began = time.process_time()
        for _ in range(job.steps):
            step(batch)
        return time.process_time() - began

    found = in_turns(job.rounds, {"learner": lambda: seconds(learner.step), "plain": lambda: seconds(other.step)})
    phases = learner.step(batch).phase_s
    share = phases.get("diagnostics", 0.0) / sum(phases.values())
    return Timed(**found, diagnostics_share=share, weights_apart=weights_apart)


def on_ranks(job: OnRanks) -> list[float]:
    """Wall seconds of each step, on the lead; the other ranks do not return."""
    ranks = job.open()
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
    ranks.order("end")
    return seconds


def _config(model: str, work: Work) -> RunConfig:
    return learner_config(
        ModelConfig(path=model), device="cpu", learning_rate=LEARNING_RATE, tokens_per_microbatch=work.tokens_per_pass
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
    return max(float((weight - others[name]).norm() / weight.norm()) for name, weight in first.named_parameters())
