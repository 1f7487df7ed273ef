"""KL in the reward, against transformers and arithmetic in float64."""

import math
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM

from fp64_oracle import sampled_logprobs
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.learner.step_report import NOTHING_TO_TRAIN
from penstock.consumers.learning.loss.reward_kl import penalized
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import AdvantageConfig, CorrectionConfig, ModelConfig, RunConfig, TrainerConfig
from penstock.schemas.rollout import RolloutGroup, unpack_floats
from training_groups import (
    assert_near,
    configuration,
    gradients_of,
    group_of,
    lag_from,
    random_group,
    segment,
    tiny_model,
)

BETA = 0.2


@pytest.fixture
def models(tmp_path: Path) -> ModelConfig:
    tiny_model(tmp_path / "model")
    tiny_model(tmp_path / "reference", seed=9)
    return ModelConfig(path=str(tmp_path / "model"), reference=str(tmp_path / "reference"))


def test_rewards_are_penalized_by_the_sum_over_all_segments_of_a_rollout() -> None:
    turns = [segment([1, 2, 3], [(1, 3)], [7, 7]), segment([1, 2, 3, 4], [(3, 4)], [7])]
    group = group_of(1, [turns, [segment([1, 2], [(1, 2)], [7])]], [1.0, 0.5])
    config = AdvantageConfig(kl_coefficient=0.5, kwargs={"normalize_std": False})
    batch = pack([group], lag_from(7), configuration("none", advantage=config))
    (microbatch,) = batch.microbatches
    assert microbatch.rollouts[microbatch.row_ids].bincount().tolist() == [3, 1]
    divergence = torch.where(microbatch.rollouts[microbatch.row_ids] == 0, 0.25, -0.5).double()
    found = penalized(batch, [divergence], config, Ranks())
    # The rewards are 1 - 0.5 * 3 * 0.25 and 0.5 + 0.5 * 0.5.
    assert found.group_advantages == {1: (-0.0625, 0.0625)}
    assert found.microbatches[0].advantages.tolist() == [
        -0.0625 if rollout == 0 else 0.0625 for rollout in microbatch.rollouts[microbatch.row_ids].tolist()
    ]


@pytest.mark.parametrize("name", ["group_relative", "batch_normalized", "reinforce_plus_plus"])
def test_a_divergence_that_is_not_finite_leaves_the_other_groups_their_advantages(name: str) -> None:
    config = AdvantageConfig(path=f"penstock.consumers.learning.advantages:{name}", kl_coefficient=0.5)
    batch = pack([random_group(n, n) for n in (1, 2, 3)], lag_from(7), configuration("none", advantage=config))
    divergences = [torch.zeros(len(each.row_ids), dtype=torch.float64) for each in batch.microbatches]
    divergences[0][0] = float("nan")
    advantages = penalized(batch, divergences, config, Ranks()).group_advantages
    failed = [index for index, values in advantages.items() if any(map(math.isnan, values))]
    assert len(failed) == 1 and all(map(math.isnan, advantages[failed[0]])) and len(advantages) == 3


def _config(models: ModelConfig, *, kl: float = BETA, truncated: str = "train", **changes) -> RunConfig:
    advantage = AdvantageConfig(kl_coefficient=kl, truncated=truncated)
    settings = {"model": models, "advantage": advantage, "correction": CorrectionConfig(mode="none")} | changes
    if not kl:
        settings["model"] = replace(models, reference=None)
    return configuration(models.path, **settings)


class Expected:
    """The penalized rewards' advantages and the tokens' logprobs under gradient, in float64."""

    def __init__(self, models: ModelConfig, groups: list[RolloutGroup], kl: float) -> None:
        self.model, reference = (
            AutoModelForCausalLM.from_pretrained(each).double() for each in (models.path, models.reference)
        )
        self.logprobs: dict[int, list[Tensor]] = {}
        self.advantages: dict[int, Tensor] = {}
        for group in groups:
            self.logprobs[group.index], rewards = [], []
            for rollout in group.rollouts:
                current, base = (
                    torch.cat([sampled_logprobs(model, part, group.sampling.temperature) for part in rollout.segments])
                    for model in (self.model, reference)
                )
                self.logprobs[group.index].append(current)
                rewards.append(rollout.reward.value - kl * (current - base).detach().sum())
            values = torch.stack(rewards)
            self.advantages[group.index] = (values - values.mean()) / (values.std() + 1e-4)

    def check(self, found: dict[str, Tensor], gain: Tensor, denominator: int) -> None:
        """Compares gradients with those of `gain`, the sum over the tokens that are to be trained."""
        self.model.zero_grad()
        (-gain / denominator).backward(retain_graph=True)
        assert_near(found, self.model, 1e-4)


def test_advantages_loss_and_gradient_are_those_of_the_penalized_reward(models) -> None:
    trainer = TrainerConfig(device="cpu", num_minibatches=2, max_grad_norm=1e9, tokens_per_microbatch=60)
    groups = [random_group(n, 1, temperature=0.8) for n in range(1, 4)] + [random_group(4, 1, rewards=[1.0] * 4)]
    learner = Learner(_config(models, trainer=trainer, max_lag=9))
    gradients, batch = gradients_of(learner), learner.pack(groups, lag_from(7))
    report = learner.step(batch)
    expected = Expected(models, groups, BETA)
    assert report.advantages.keys() == expected.advantages.keys()
    for index, advantages in expected.advantages.items():
        assert report.advantages[index] == pytest.approx(advantages.tolist(), abs=1e-4)
    assert report.num_groups_skipped == 0, "the penalties differ where the rewards are equal"
    for minibatch, found in zip(batch.minibatches, gradients, strict=True):
        gain = sum(
            advantage * logprobs.sum()
            for index in minibatch.indexes
            for advantage, logprobs in zip(expected.advantages[index], expected.logprobs[index], strict=True)
        )
        expected.check(found, gain, minibatch.num_tokens)


def _rollouts(group: RolloutGroup, *cut_off: int) -> RolloutGroup:
    """The group with these siblings at the token limit, and the others not."""
    rollouts = []
    for place, rollout in enumerate(group.rollouts):
        *earlier, last = rollout.segments
        reason = "length" if place in cut_off else "stop"
        rollouts.append(replace(rollout, segments=(*earlier, replace(last, finish_reason=reason))))
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize(
    ("kl", "truncated", "max_lag", "mode"),
    [(0.0, "mask", 1, "none"), (1e-9, "mask", 9, "none"), (BETA, "mask", 1, "sequence_truncate"),
     (0.0, "train", 1, "sequence_truncate"), (BETA, "train", 9, "none")],
)  # fmt: skip
def test_the_gradient_is_the_sum_over_the_tokens_that_the_loss_mask_keeps(models, kl, truncated, max_lag, mode) -> None:
    """Truncated rollouts, tokens that are too old, and both; with and without KL in the reward."""
    trainer = TrainerConfig(device="cpu", max_grad_norm=1e9, tokens_per_microbatch=60)
    correction = CorrectionConfig(mode=mode, threshold=1e8)
    config = _config(models, kl=kl, truncated=truncated, correction=correction, trainer=trainer, max_lag=max_lag)
    groups = [_rollouts(random_group(1, 1), 1), _rollouts(random_group(2, 1), 0, 3), _rollouts(random_group(3, 1))]
    learner = Learner(config)
    gradients, batch = gradients_of(learner), learner.pack(groups, lag_from(7))
    report = learner.step(batch)
    expected = Expected(models, groups, kl)
    gain, num_trained, denominator = torch.zeros((), dtype=torch.float64), 0, 0
    for group in groups:
        for place, rollout in enumerate(group.rollouts):
            if truncated == "mask" and rollout.is_truncated:
                continue
            (part,) = rollout.segments
            denominator += part.num_sampled_tokens
            lag = [7 - span.version for span in part.version_spans for _ in range(span.end - span.start)]
            kept = torch.tensor(lag) <= 2 * max_lag
            logprobs = expected.logprobs[group.index][place][kept]
            behavior = torch.tensor(unpack_floats(part.behavior_logprobs), dtype=torch.float64)[kept]
            ratio = (logprobs.detach() - behavior).mean().exp() if mode != "none" else 1.0
            if len(logprobs):
                gain = gain + expected.advantages[group.index][place] * ratio * logprobs.sum()
            num_trained += len(logprobs)
    assert (batch.minibatches[0].num_tokens, report.num_tokens_trained) == (denominator, num_trained)
    expected.check(gradients[0], gain, denominator)


@pytest.mark.parametrize("kl", [0.0, BETA])
def test_truncated_rollouts_alone_take_no_step_where_they_are_masked(models, kl) -> None:
    learner = Learner(_config(models, kl=kl, truncated="mask", max_lag=9))
    report = learner.step(learner.pack([_rollouts(random_group(1, 1), 0, 1, 2, 3)], lag_from(7)))
    assert (report.num_tokens_trained, report.num_optimizer_steps) == (0, 0)
    assert report.skipped_reason == NOTHING_TO_TRAIN and report.counts_as_update
    assert learner.step(learner.pack([random_group(1, 1)], lag_from(7))).num_optimizer_steps == 1


def test_a_stale_segment_counts_for_the_penalty_of_its_rollout_and_is_not_trained(models) -> None:
    rows = [[segment([1, 2, 3, 4], [(1, 4)], [version] * 3)] for version in (7, 2, 7)]
    learner = Learner(_config(models, max_lag=2))
    batch = learner.pack([group_of(1, rows, [1.0, 0.0, 0.5])], lag_from(7))
    assert (len(batch.microbatches[0].rollouts), batch.num_tokens_trained, batch.num_rows) == (3, 6, 2)
    report = learner.step(batch)
    # Siblings of equal tokens have equal penalties: the advantages are those of the rewards, the stale one's too.
    assert report.advantages[1] == pytest.approx((0.99980004, -0.99980004, 0.0), abs=1e-5)


def test_groups_are_spared_and_failed_with_kl_in_the_reward_as_without(models) -> None:
    learner = Learner(_config(models, correction=CorrectionConfig(), max_lag=9))
    nan = segment([1, 2], [(1, 2)], [7], [float("nan")])
    groups = [random_group(1, 1), group_of(2, [[nan]] * 2, [1.0, 0.0]), random_group(3, 1)]
    report = learner.step(learner.pack(groups, lag_from(7)))
    assert set(report.failed) == {2} and report.spared == {1, 3}


def test_without_a_difference_from_the_reference_groups_of_equal_rewards_teach_nothing(models) -> None:
    config = configuration(models.path, advantage=AdvantageConfig(kl_coefficient=BETA))
    learner = Learner(config)
    report = learner.step(learner.pack([random_group(1, 1), random_group(2, 1, rewards=[1.0] * 4)], lag_from(7)))
    assert report.advantages[2] == (0.0,) * 4
    assert (report.num_groups_skipped, report.teaches(1), report.teaches(2)) == (1, True, False)
