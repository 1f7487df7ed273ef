"""The engine returns the logprobs that the trainer computes, before and after an update in flight."""

import itertools
import time

import numpy as np
import pytest

from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.producers.interfaces import Completion
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig, SamplingConfig, TrainerConfig
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import Rollout, RolloutGroup, SamplingSettings, Segment, VersionSpan, pack_ids
from training_groups import proximal_logprobs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

PROMPTS = [[3, 17, 5, 11, 8], [4, 4, 9], [20, 1, 2, 3, 4, 5, 6, 7]]
NUM_SIBLINGS = 16


def group_of(index: int, prompt: list[int], completions: list[Completion], sampling: SamplingSettings, engine):
    context, start = pack_ids(prompt), len(prompt)
    rollouts = tuple(
        Rollout(
            segments=(
                Segment(
                    token_ids=context + completion.token_ids,
                    behavior_logprobs=completion.behavior_logprobs,
                    loss_mask=((start, start + len(completion.token_ids) // 4),),
                    version_spans=tuple(
                        VersionSpan(span.version, span.start + start, span.end + start)
                        for span in completion.version_spans
                    ),
                ),
            ),
            reward=Reward(value=float(n % 2)),
        )
        for n, completion in enumerate(completions)
    )
    return RolloutGroup(
        index=index,
        prompt=Prompt(text="?"),
        rollouts=rollouts,
        producer_id="p",
        fingerprint=engine.fingerprint,
        sampling=sampling,
    )


async def gaps(engine, learner: Learner, config: RunConfig, version: int) -> np.ndarray:
    """Returns |proximal - behavior| of more than a thousand freshly sampled tokens."""
    groups: list[RolloutGroup] = []
    for index, prompt in enumerate(itertools.cycle(PROMPTS), 1):
        if index > len(PROMPTS) and sum(r.num_sampled_tokens for g in groups for r in g.rollouts) > 1000:
            break
        request = f"v{version}-{index}-{time.monotonic_ns()}"
        completions = await engine.generate(prompt, config.sampling, NUM_SIBLINGS, request)
        groups.append(group_of(index, prompt, completions, config.sampling, engine))
    assert {s.version for g in groups for r in g.rollouts for s in r.segments[0].version_spans} == {version}
    batch = pack(groups, lambda sampled: version - sampled, config)
    found = []
    for proximal, part in zip(proximal_logprobs(learner, batch), batch.microbatches, strict=True):
        found.append((proximal - part.behavior_logprobs).abs().numpy())
    learner.step(batch)
    return np.concatenate(found)


@pytest.mark.parametrize(("shared_engine", "temperature"), [("untied", 1.0), ("tied", 0.7)], indirect=["shared_engine"])
@pytest.mark.asyncio(loop_scope="session")
async def test_logprobs_of_engine_and_trainer_agree_at_lag_0_through_updates(shared_engine, temperature):
    config = RunConfig(
        name="parity",
        model=ModelConfig(path=str(shared_engine.folder / "model")),
        environment=EnvironmentConfig(path="none:None"),
        sampling=SamplingConfig(temperature=temperature, max_tokens=100),
        trainer=TrainerConfig(learning_rate=1e-2, device="cpu"),
    )
    learner = Learner(config)
    for _ in range(3):
        version = await shared_engine.load(learner.published_weights())
        gap = await gaps(shared_engine.engine, learner, config, version)
        assert gap.mean() <= 1e-5
        assert gap.max() <= 1e-4
    assert learner.num_steps == 3, "the weights did move between the comparisons"
