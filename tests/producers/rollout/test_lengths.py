"""Rewards of length, against values by hand."""

import pytest

from penstock.producers.interfaces import RolloutFacts
from penstock.producers.rollout import lengths
from penstock.producers.rollout.rewards import RewardError, reward_components
from penstock.producers.rollout.scoring import RewardScorer
from penstock.schemas.config import RewardConfig, WeightedReward
from penstock.schemas.prompt import Prompt, Reward

PROMPT = Prompt(text="1+1=", answer="2")


def facts(num_tokens: int, max_tokens: int = 20_480) -> RolloutFacts:
    reason = "length" if num_tokens == max_tokens else "stop"
    return RolloutFacts(num_prompt_tokens=3, num_tokens=num_tokens, max_tokens=max_tokens, finish_reason=reason)


def test_soft_overlong_is_dapos_equation_13_with_the_papers_lengths() -> None:
    for num_tokens, expected in [
        (1, 0.0), (16_384, 0.0), (16_385, -1 / 4096), (17_408, -0.25), (18_432, -0.5), (20_480, -1.0), (20_481, -1.0),
    ]:  # fmt: skip
        assert lengths.soft_overlong(PROMPT, "", facts=facts(num_tokens), cache_tokens=4096) == expected, num_tokens
    for cache_tokens in (0, -4, 65):
        with pytest.raises(
            ValueError, match=f"cache_tokens = {cache_tokens}, expected 1 or more and at most the limit"
        ):
            lengths.soft_overlong(PROMPT, "", facts=facts(5, max_tokens=64), cache_tokens=cache_tokens)


def test_target_length_is_the_distance_either_way_and_relative_length_falls_from_the_middle_on() -> None:
    for num_tokens, expected in [(100, 0.0), (60, -40.0), (512, -412.0)]:
        assert lengths.target_length(PROMPT, "", facts=facts(num_tokens), num_tokens=100) == expected
    for of, rewards in [
        ([100, 300, 150, 250, 200], [0.0, -0.5, 0.0, -0.25, 0.0]),
        ([7, 7, 7], [0.0] * 3),
        ([7], [0.0]),
    ]:
        assert lengths.relative_length(PROMPT, ["" for _ in of], facts=[facts(length) for length in of]) == rewards


class RewardedEnvironment:
    num_evaluation_prompts = 0

    def reward(self, prompt: Prompt, completion: str) -> float:
        return float(completion == prompt.answer)


async def test_they_are_named_by_path_beside_the_environments_reward(make_config) -> None:
    path = "penstock.producers.rollout.lengths:"
    config = make_config(
        reward=RewardConfig(
            components=(
                WeightedReward(name="right", path="environment"),
                WeightedReward(name="long", path=f"{path}soft_overlong", kwargs={"cache_tokens": 4}, weight=0.5),
                WeightedReward(name="relative", path=f"{path}relative_length", weight=0.0),
            )
        )
    )
    scorer = RewardScorer(reward_components(config, RewardedEnvironment(), "environment"), config.reward)  # type: ignore[arg-type]
    assert await scorer.score(PROMPT, ["2", "3"], [facts(3, max_tokens=8), facts(7, max_tokens=8)]) == (
        Reward(value=1.0, parts={"right": 1.0, "long": 0.0, "relative": 0.0}),
        Reward(value=-0.375, parts={"right": 0.0, "long": -0.75, "relative": -0.5}),
    )
    with pytest.raises(RewardError, match="long: ValueError: cache_tokens = 4, expected 1 or more and at most the"):
        await scorer.score(PROMPT, ["2"], [facts(3, max_tokens=3)])
    scorer.close()
