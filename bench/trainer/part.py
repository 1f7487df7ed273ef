"""The measuring processes of the trainer section."""

import sys
import time
from functools import partial

import msgspec
from msgspec.structs import replace

from bench.groups import learner_config, random_group
from bench.result import in_turns
from bench.trainer.ranks import RankJob
from penstock.consumers.learning.batch.batch import Batch
from penstock.consumers.learning.learner.learner import Learner
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


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """A learner with `trainer.compile` and one without on the same batch, `steps` of each a round, in turns."""

    model: str
    work: Work
    rounds: int
    steps: int


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """By round, of all its steps: processor seconds on one thread, which other load hardly lengthens.

    diagnostics_share: of the last step without `trainer.compile`.
    """

    compiled: list[float]
    plain: list[float]
    diagnostics_share: float


class OnRanks(RankJob, frozen=True, kw_only=True):
    """Batches trained on several ranks, after one that does not count."""

    model: str
    work: Work
    steps: int


def time_compiled(job: Compiled) -> Timed:
    config = _config(job.model, job.work)
    learners = {
        "compiled": Learner(replace(config, trainer=replace(config.trainer, compile=True))),
        "plain": Learner(config),
    }
    batch = _batch(learners["plain"], job.work)

    def seconds(learner: Learner) -> float:
        began = time.process_time()
        for _ in range(job.steps):
            learner.step(batch)
        return time.process_time() - began

    for learner in learners.values():
        learner.step(batch)
    found = in_turns(job.rounds, {name: partial(seconds, learner) for name, learner in learners.items()})
    phases = learners["plain"].step(batch).phase_s
    return Timed(**found, diagnostics_share=phases.get("diagnostics", 0.0) / sum(phases.values()))


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
