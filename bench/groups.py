"""Prompt groups of random tokens, and the settings of a run whose learner is measured alone with them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig, TrainerConfig
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import (
    EngineFingerprint,
    Rollout,
    RolloutGroup,
    SamplingSettings,
    Segment,
    VersionSpan,
    pack_floats,
    pack_ids,
)

FINGERPRINT = EngineFingerprint(
    engine="vllm",
    version="0.32.0",
    model="runs/models/demo",
    dtype="bfloat16",
    head_dtype="float32",
    logprobs_mode="processed_logprobs",
    prefix_caching=False,
    async_scheduling=False,
)


def learner_config(model: ModelConfig, **trainer: Any) -> RunConfig:
    """Returns a run on one thread, whose groups do not come from an environment. trainer: fields of its section."""
    return RunConfig(
        name="bench",
        model=model,
        environment=EnvironmentConfig(path="none:None"),
        trainer=TrainerConfig(num_threads=1, **trainer),
    )


def random_group(
    index: int, lengths: Sequence[int], vocabulary: int, *, prompt_tokens: int = 1, versions: Sequence[int] = (0,)
) -> RolloutGroup:
    """Makes a rollout of each length, in sampled tokens, with the logprobs of a policy of equal logits.

    versions: of the policies that sampled a rollout, one after another, equally many tokens each.
    """
    draw = np.random.default_rng(index)
    prompt = draw.integers(0, vocabulary, prompt_tokens).tolist()

    def segment(length: int) -> Segment:
        start, end = prompt_tokens, prompt_tokens + length
        bounds = [start + length * n // len(versions) for n in range(len(versions) + 1)]
        return Segment(
            token_ids=pack_ids([*prompt, *draw.integers(0, vocabulary, length).tolist()]),
            behavior_logprobs=pack_floats([-math.log(vocabulary)] * length),
            loss_mask=((start, end),),
            version_spans=tuple(VersionSpan(version, *bounds[n : n + 2]) for n, version in enumerate(versions)),
            finish_reason="length",
        )

    return RolloutGroup(
        index=index,
        prompt=Prompt(text="What is 12 + 34? Think aloud, then answer.", answer="46"),
        rollouts=tuple(
            Rollout(
                segments=(segment(length),),
                reward=Reward(value=float(n % 2), parts={"exact": float(n % 2), "digits": 1.0}),
            )
            for n, length in enumerate(lengths)
        ),
        producer_id="producer-0",
        fingerprint=FINGERPRINT,
        sampling=SamplingSettings(max_tokens=max(lengths)),
    )
