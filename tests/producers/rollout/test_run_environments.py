"""What the environments of a run are refused for together."""

import re
from typing import Any

import pytest

from penstock.producers.environments.calculator import Calculator
from penstock.producers.rollout.run_environments import open_environments
from penstock.schemas.config import ConfigError, EnvironmentConfig, ModelConfig, RewardConfig, RunConfig
from penstock.schemas.prompt import Prompt, Reward

SUMS = EnvironmentConfig(name="sums", path="penstock.producers.environments.arithmetic:Arithmetic")
TOOLS = EnvironmentConfig(name="tools", path="penstock.producers.environments.calculator:Calculator")
LENGTHS = RewardConfig(path="penstock.producers.rollout.lengths:target_length", kwargs={"num_tokens": 8})


def config(*environments: EnvironmentConfig, **changes: Any) -> RunConfig:
    return RunConfig(name="mixed", model=ModelConfig(path="m"), environments=environments, **changes)


class AskedByRubrics(Calculator):
    async def reward(self, prompt: Prompt, completion: str) -> Reward:  # type: ignore[override]
        return super().reward(prompt, completion)


RUBRICS = EnvironmentConfig(name="rubrics", path=f"{__name__}:AskedByRubrics")


@pytest.mark.parametrize(
    ("environment", "reward", "shown"),
    [
        (TOOLS, LENGTHS, "'path': 'penstock.producers.rollout.lengths:target_length'"),
        (RUBRICS, RewardConfig(retries=2), "'retries': 2"),
    ],
)
def test_a_reward_that_nothing_would_ask_for_is_refused(
    environment: EnvironmentConfig, reward: RewardConfig, shown: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^reward = \{{.*{re.escape(shown)}.* expected no \[reward\]$"):
        open_environments(config(environment, reward=reward))


def test_a_reward_beside_an_environment_that_converses_is_for_the_others() -> None:
    found = open_environments(config(TOOLS, SUMS, reward=LENGTHS))
    assert [each.name for each in found if each.converses] == ["tools"]
