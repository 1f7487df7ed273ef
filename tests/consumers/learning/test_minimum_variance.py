"""VCPO's baseline, against gradients of one rollout at a time in float64."""

import math

import numpy as np
import pytest
import torch

from fp64_oracle import sampled_logprobs
from penstock.consumers.learning.advantages import minimum_variance
from penstock.consumers.learning.learner.learner import Learner
from penstock.schemas.config import AdvantageConfig, ConfigError, CorrectionConfig, Plug, RunConfig, TrainerConfig
from penstock.schemas.rollout import unpack_floats
from training_groups import configuration, lag_from, random_groups, tiny_model

ADVANTAGE = AdvantageConfig(path="penstock.consumers.learning.advantages:minimum_variance")
GRPO = "penstock.consumers.learning.objectives.grpo:Grpo"
NOW = 7


def run(folder, correction: CorrectionConfig, **changes) -> RunConfig:
    return configuration(folder, advantage=ADVANTAGE, correction=correction, **changes)


def weights_of(correction: CorrectionConfig, gaps: torch.Tensor) -> torch.Tensor:
    """The weights of a rollout's tokens; gaps: current - behavior."""
    if correction.mode == "token_truncate":
        return gaps.exp().clamp(max=correction.threshold)
    return torch.full_like(gaps, min(math.exp(gaps.sum()), correction.threshold))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize(
    "correction",
    [
        CorrectionConfig(mode="token_truncate", threshold=1.5),
        CorrectionConfig(mode="sequence_truncate", sequence_ratio="product", threshold=1.2),
    ],
    ids=["token", "sequence"],
)
def test_it_is_the_paper_s_baseline_with_the_norms_of_one_gradient_at_a_time(tmp_path, correction, aggregation) -> None:
    model = tiny_model(tmp_path).double()
    # Several passes a step, two steps a batch, the second of other weights: the baseline is of those before both.
    trainer = TrainerConfig(device="cpu", tokens_per_microbatch=32, num_minibatches=2)
    objective = Plug(path=GRPO, kwargs={"aggregation": aggregation})
    learner = Learner(run(tmp_path, correction, trainer=trainer, objective=objective, max_lag=4))
    groups = random_groups(4)
    report = learner.step(learner.pack(groups, lag_from(NOW)))
    for group in groups:
        squares: list[float] = []
        for rollout in group.rollouts:
            model.zero_grad()
            (segment,) = rollout.segments
            current = sampled_logprobs(model, segment)
            behavior = torch.tensor(list(unpack_floats(segment.behavior_logprobs))).double()
            weights = weights_of(correction, current.detach() - behavior)
            (weights * current / (len(current) if aggregation == "sequence" else 1)).sum().backward()
            squares.append(sum(p.grad.square().sum().item() for p in model.parameters()))
            if correction.mode == "sequence_truncate":  # w^2 |grad log p|^2
                model.zero_grad()
                (sampled_logprobs(model, segment).sum() / (len(current) if aggregation == "sequence" else 1)).backward()
                norm = sum(p.grad.square().sum().item() for p in model.parameters())
                assert squares[-1] == pytest.approx(weights[0].item() ** 2 * norm, rel=1e-6)
        rewards = np.array([rollout.reward.value for rollout in group.rollouts])
        baseline = (rewards * squares).sum() / sum(squares)
        assert report.advantages[group.index] == pytest.approx(rewards - baseline, rel=1e-4, abs=1e-5)
        around = [
            ((rewards - b) ** 2 * squares).sum() for b in (baseline - 0.01, baseline, baseline + 0.01, rewards.mean())
        ]
        assert around[1] == min(around) < around[3]


def test_groups_without_variance_and_rewards_alone_have_the_plain_mean(tmp_path) -> None:
    tiny_model(tmp_path)
    learner = Learner(run(tmp_path, CorrectionConfig()))
    groups = [*random_groups(1), *random_groups(3, rewards=[0.5] * 4)[1:]]
    batch = learner.pack(groups, lag_from(NOW))
    rewards = batch.rewards.by_group(batch.rewards.values)[0]
    assert minimum_variance(batch.rewards)[:4] == pytest.approx(rewards - rewards.mean())
    advantages = learner.step(batch).advantages
    assert advantages[2] == advantages[3] == (0.0,) * 4
    assert advantages[1] != pytest.approx(rewards - rewards.mean(), rel=1e-3) and np.ptp(advantages[1]) == np.ptp(
        rewards
    )


def test_terms_without_an_advantage_are_refused(tmp_path) -> None:
    tiny_model(tmp_path)
    with pytest.raises(ConfigError, match=r"minimum_variance' with a \[teacher\] or terms .* expected neither"):
        Learner(run(tmp_path, CorrectionConfig(), objective=Plug(path=GRPO, kwargs={"entropy_coefficient": 0.1})))
