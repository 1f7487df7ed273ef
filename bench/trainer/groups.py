"""What a learner that is measured alone needs: a run's settings, and prompt groups of random tokens."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.pipeline.records import FINGERPRINT
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig, TrainerConfig
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    VersionSpan,
    pack_floats,
    pack_ids,
)


def learner_config(model: ModelConfig, **trainer: Any) -> RunConfig:
    """Returns a run on one thread, whose groups do not come from an environment. trainer: fields of its section."""
    return RunConfig(
        name="bench",
        model=model,
        environment=EnvironmentConfig(path="none:None"),
        trainer=TrainerConfig(num_threads=1, **trainer),
    )


def random_group(index: int, lengths: Sequence[int], vocabulary: int, *, prompt_tokens: int = 1) -> RolloutGroup:
    """Makes a rollout of each length, in sampled tokens, with the logprobs of a policy of equal logits."""
    rng = np.random.default_rng(index)
    prompt = rng.integers(0, vocabulary, prompt_tokens).tolist()
    return RolloutGroup(
        index=index,
        prompt=Prompt(text="?"),
        rollouts=tuple(
            Rollout(segments=(_segment(prompt, length, vocabulary, rng),), reward=Reward(value=float(n % 2)))
            for n, length in enumerate(lengths)
        ),
        producer_id="producer-0",
        fingerprint=FINGERPRINT,
        sampling=SamplingSettings(temperature=1.0, max_tokens=max(lengths)),
    )


def _segment(prompt: list[int], length: int, vocabulary: int, rng: np.random.Generator) -> Segment:
    start, end = len(prompt), len(prompt) + length
    return Segment(
        token_ids=pack_ids([*prompt, *rng.integers(0, vocabulary, length).tolist()]),
        behavior_logprobs=pack_floats([-math.log(vocabulary)] * length),
        loss_mask=((start, end),),
        version_spans=(VersionSpan(0, start, end),),
    )
