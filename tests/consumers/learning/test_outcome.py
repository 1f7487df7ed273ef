"""What a batch's rollouts earned, by name."""

import statistics

import msgspec
import pytest

from mini_producer import make_group
from penstock.consumers.learning.outcome import mean_rewards, outcome
from penstock.schemas.metrics import MAX_PART_CHARACTERS, MAX_PARTS
from penstock.schemas.prompt import Reward
from penstock.schemas.rollout import RolloutGroup


def group(index: int, rewards: list[Reward], truncated: int = 0) -> RolloutGroup:
    made = make_group(index, 0, rewards=[reward.value for reward in rewards])
    rollouts = []
    for n, (rollout, reward) in enumerate(zip(made.rollouts, rewards, strict=True)):
        (segment,) = rollout.segments
        segment = msgspec.structs.replace(segment, finish_reason="length" if n < truncated else "stop")
        rollouts.append(msgspec.structs.replace(rollout, reward=reward, segments=(segment,)))
    return msgspec.structs.replace(made, rollouts=tuple(rollouts))


def test_reward_parts_spread_length_and_truncation_are_those_of_the_rollouts() -> None:
    shaped = [Reward(value=0.5, parts={"exact": 0.0, "form": 1.0}), Reward(value=1.5, parts={"exact": 1.0})]
    found = outcome([group(1, shaped, truncated=1), group(2, [Reward(value=0.5), Reward(value=0.5)])])
    assert found == pytest.approx(
        {
            "reward": 0.75,
            "reward/exact": 0.5,  # of those that have the part
            "reward/form": 1.0,
            "reward_std": statistics.stdev([0.5, 1.5]) / 2,
            "completion_tokens": 3.0,
            "truncated_frac": 0.25,
            "truncated_rollouts": 1.0,
        }
    )
    assert outcome([]) == {}


def test_the_parts_of_agents_are_bounded_in_number_length_and_size() -> None:
    often = {f"reward/often {n}": 1.0 for n in range(MAX_PARTS - 1)}
    tables = [
        {"reward": 1.0, **often, "reward/once a": 1.0, "reward/once b": 1.0, f"reward/{'n' * 1000}": 1.0},
        {"reward": 0.0, **often},
    ]
    assert mean_rewards(tables) == {"reward": 0.5, **often, "reward/once a": 1.0}
    longest = f"reward/{'n' * MAX_PART_CHARACTERS}"
    assert mean_rewards([{"reward": 1.0, longest: 2.0}])[longest] == 2.0
    assert mean_rewards([{"reward": 1.0, "reward/huge": 1e308}] * 2) == {"reward": 1.0}, "its sum is not finite"
