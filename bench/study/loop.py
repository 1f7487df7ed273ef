"""One cell: the real learner on real groups, sampled by the policy that is a set number of optimizer steps old."""

import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from msgspec import UNSET

from bench.study.cells import StudyCell, StudyResult, settings
from bench.study.sampler import Sampled, StudySampler
from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.learner.learner import Learner
from penstock.producers.environments.arithmetic import Arithmetic
from penstock.producers.rollout.episode import load_tokenizer
from penstock.schemas.config import RunConfig
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import (
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    VersionSpan,
    decode_group,
    encode_group,
    pack_floats,
    pack_ids,
)

PRODUCER_ID = "study"
_SEEDS_APART = 1_000_003
"""Runs of neighbouring seeds share no sampling noise in so many updates."""


class StudyRecorder:
    """Turns task indexes into the groups that the trainer would read from the stream.

    tokenizer: a transformers tokenizer of the model.
    """

    def __init__(self, config: RunConfig, environment: Arithmetic, tokenizer: Any, sampler: StudySampler) -> None:
        self._config = config
        self._environment = environment
        self._tokenizer = tokenizer
        self._sampler = sampler

    def groups(self, indexes: Sequence[int], version: int, seed: int) -> list[RolloutGroup]:
        """Returns a group for each index, sampled by the weights that the sampler holds and labelled `version`.

        Each is encoded to the wire format and decoded again.
        """
        settings = self._config.sampling
        sampling = SamplingSettings(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            stop_token_ids=settings.stop_token_ids,
            top_logprobs=settings.top_logprobs or UNSET,
        )
        prompts = [self._environment.prompt(index) for index in indexes]
        contexts = self._tokenize(prompts)
        siblings = self._sampler.sample(contexts, self._config.group_size, sampling, seed)
        groups = []
        for index, prompt, context, completions in zip(indexes, prompts, contexts, siblings, strict=True):
            group = RolloutGroup(
                index=index,
                prompt=prompt,
                rollouts=tuple(self._rollout(prompt, context, completion, version) for completion in completions),
                producer_id=PRODUCER_ID,
                fingerprint=self._sampler.fingerprint,
                sampling=sampling,
            )
            groups.append(decode_group(encode_group(group)))
        return groups

    def held_out_accuracy(self) -> float:
        """Returns the share of held-out problems that the sampler's weights answer exactly, greedily."""
        environment = self._environment
        prompts = [environment.evaluation_prompt(n) for n in range(1, environment.num_evaluation_prompts + 1)]
        greedy = SamplingSettings(temperature=0.0, max_tokens=self._config.sampling.max_tokens)
        answers = self._sampler.sample(self._tokenize(prompts), 1, greedy, seed=0)
        exact = [
            environment.reward(prompt, self._decode(answer)).parts["exact"]
            for prompt, [answer] in zip(prompts, answers, strict=True)
        ]
        return sum(exact) / len(exact)

    def _rollout(self, prompt: Prompt, context: list[int], completion: Sampled, version: int) -> Rollout:
        start, end = len(context), len(context) + len(completion.token_ids)
        segment = Segment(
            token_ids=pack_ids(context + completion.token_ids),
            behavior_logprobs=pack_floats(completion.behavior_logprobs),
            loss_mask=((start, end),),
            version_spans=(VersionSpan(version, start, end),),
            finish_reason=completion.finish_reason,
            top_logprobs=completion.top or UNSET,
        )
        return Rollout(segments=(segment,), reward=self._environment.reward(prompt, self._decode(completion)))

    def _tokenize(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self._tokenizer.encode(prompt.text, add_special_tokens=False) for prompt in prompts]

    def _decode(self, completion: Sampled) -> str:
        return self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def run_cell(cell: StudyCell, config: RunConfig) -> StudyResult:
    """Trains `config.num_updates` batches at a forced lag of `cell.lag` optimizer steps.

    Cells of one seed get the same problems, and the same noise for the same policy: they diverge where their policies
    do. Update u is sampled by the policy of max(0, u - lag) steps; a pipeline that fills up starts likewise.

    Args:
        config: of `cell.config()`; another number of updates is allowed.

    Raises:
        ConfigError: no such model, or settings that the learner refuses.
    """
    environment = Arithmetic(seed=config.seed, **config.environment.kwargs)
    tokenizer = load_tokenizer(config)
    learner = Learner(config)
    sampler = StudySampler(config.model.path, tokenizer.eos_token_id)
    recorder = StudyRecorder(config, environment, tokenizer, sampler)
    # The latest lag + 1 policies, the oldest first: that one samples.
    policies = deque([(0, learner.published_weights())], maxlen=cell.lag + 1)
    lag_of = LagTable(0, {}, {})
    began_s, num_skipped, ess = time.monotonic(), 0, []
    accuracy = [(0, recorder.held_out_accuracy())]
    for update in range(config.num_updates):
        version, weights = policies[0]
        sampler.load(weights)
        first_index = 1 + update * config.groups_per_batch
        indexes = range(first_index, first_index + config.groups_per_batch)
        groups = recorder.groups(indexes, version, config.seed * _SEEDS_APART + update)
        report = learner.step(learner.pack(groups, lag_of))
        if report.skipped_reason is None:
            policies.append((learner.num_steps, learner.published_weights()))
            lag_of.advance(learner.num_steps)
        else:
            num_skipped += 1
        if "ess_fraction" in report.metrics:
            ess.append(report.metrics["ess_fraction"])
        done = update + 1
        if done % config.evaluation.every == 0 or done == config.num_updates:
            sampler.load(policies[-1][1])
            accuracy.append((done, recorder.held_out_accuracy()))
    return StudyResult(
        cell=cell,
        settings=settings(cell, config),
        accuracy=accuracy,
        mean_ess=round(fmean(ess), 5),
        num_skipped=num_skipped,
        wall_s=round(time.monotonic() - began_s, 1),
    )
