"""One cell: the real learner on real groups, sampled by the policy that is a set number of optimizer steps old."""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import count, islice

from penstock.consumers.learning.learner import Learner
from penstock.consumers.learning.packing import pack
from penstock.consumers.learning.staleness import LagTable
from penstock.consumers.learning.step_report import StepReport
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import RunConfig
from torch import Tensor

from bench.study.cells import StudyCell, settings
from bench.study.results import StudyResult
from bench.study.rollouts import StudyRecorder
from bench.study.sampler import StudySampler

CURVES = (
    "ess_fraction", "applied_ess_fraction", "chi2", "masked_frac", "policy_clipped_frac", "entropy", "grad_norm",
)  # fmt: skip
"""Metrics of a step that a result keeps, beside reward and lag."""
_SEEDS_APART = 1_000_003
"""Runs of neighbouring seeds share no sampling noise in so many updates."""


class StudyPolicies:
    """The latest `lag + 1` policies. The oldest of them samples: it is `lag` optimizer steps behind, less at the start.

    weights: those of version 0.
    """

    def __init__(self, weights: Mapping[str, Tensor], lag: int) -> None:
        self._kept = deque([(0, weights)], maxlen=lag + 1)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        self._kept.append((version, weights))

    @property
    def sampling(self) -> tuple[int, Mapping[str, Tensor]]:
        return self._kept[0]

    @property
    def current(self) -> tuple[int, Mapping[str, Tensor]]:
        return self._kept[-1]


def run_cell(cell: StudyCell, config: RunConfig, on_update: Callable[[int], None] = lambda update: None) -> StudyResult:
    """Trains `config.num_updates` batches at a forced lag of `cell.lag` optimizer steps.

    Cells of one seed get the same problems, and the same noise for the same policy: they part where their policies do.
    Update u is sampled by the policy of max(0, u - lag) steps; a pipeline that fills up starts likewise.

    Args:
        config: of `cell.config()`; another number of updates is allowed.
        on_update: called after each update with how many are done.

    Raises:
        ConfigError: no such model, or settings that the learner refuses.
    """
    environment = Arithmetic(seed=config.seed, **config.environment.kwargs)
    tokenizer = load_tokenizer(config)
    learner = Learner(config)
    sampler = StudySampler(config.model.path, tokenizer.eos_token_id)
    recorder = StudyRecorder(config, environment, tokenizer, sampler)
    policies = StudyPolicies(learner.published_weights(), cell.lag)
    lag_of = LagTable(0, {}, {})
    indexes = count(1)
    result = StudyResult.begin(cell, settings(cell, config))
    result.accuracy.append((0, recorder.held_out_accuracy()))
    for update in range(config.num_updates):
        version, weights = policies.sampling
        sampler.load(weights)
        batch_indexes = list(islice(indexes, config.groups_per_batch))
        groups = recorder.groups(batch_indexes, version, config.seed * _SEEDS_APART + update)
        lag = lag_of(version)
        report = learner.step(pack(groups, lag_of, config))
        if report.skipped_reason is None:
            policies.publish(learner.num_steps, learner.published_weights())
            lag_of.advance(learner.num_steps)
        _record(result, report, lag)
        done = update + 1
        if done % config.evaluation.every == 0 or done == config.num_updates:
            sampler.load(policies.current[1])
            result.accuracy.append((done, recorder.held_out_accuracy()))
        on_update(done)
    return result


def _record(result: StudyResult, report: StepReport, lag: int) -> None:
    result.curves.setdefault("lag", []).append(lag)
    result.curves.setdefault("reward", []).append(report.metrics["reward"])
    for name in CURVES:
        result.curves.setdefault(name, []).append(report.metrics.get(name))
    if report.skipped_reason is not None:
        result.skipped[report.skipped_reason] = result.skipped.get(report.skipped_reason, 0) + 1
