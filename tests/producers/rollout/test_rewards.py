"""Rewards away from the event loop, and what becomes of those that misbehave."""

import asyncio
import math
import threading

import pytest

from penstock.producers.rollout.rewards import RewardError, RewardScorer, reward_function
from penstock.schemas.config import ConfigError, Plug
from penstock.schemas.prompt import Prompt, Reward

PROMPT = Prompt(text="1+1=", answer="2")


def length_reward(prompt: Prompt, completion: str, *, scale: float = 1.0) -> float:
    return scale * len(completion)


def no_reward(prompt: Prompt) -> float:
    return 0.0


class PosesNothing:
    num_evaluation_prompts = 0

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 7.0


async def test_numbers_and_rewards_are_both_accepted_in_the_order_of_the_completions() -> None:
    scorer = RewardScorer(
        lambda prompt, completion: Reward(value=2.0) if completion == "2" else completion == prompt.answer
    )
    assert await scorer.score(PROMPT, ["2", "3"]) == (Reward(value=2.0), Reward(value=0.0))
    scorer.close()


async def test_a_reward_runs_outside_the_event_loops_thread() -> None:
    threads = []
    scorer = RewardScorer(lambda prompt, completion: threads.append(threading.current_thread()) or 0.0)
    await scorer.score(PROMPT, ["a", "b"])
    assert len(set(threads)) == 1 and threads[0] is not threading.current_thread()
    scorer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_not_finite_is_an_error_that_shows_the_completion(value: float) -> None:
    scorer = RewardScorer(lambda prompt, completion: value)
    with pytest.raises(RewardError, match=f"{value} for completion 'x', expected a finite number"):
        await scorer.score(PROMPT, ["x"])
    scorer.close()


async def test_a_reward_that_raises_names_its_error_and_the_scorer_lives_on() -> None:
    def reward(prompt: Prompt, completion: str) -> float:
        return 1 / len(completion)

    scorer = RewardScorer(reward)
    with pytest.raises(RewardError, match="ZeroDivisionError: division by zero"):
        await scorer.score(PROMPT, ["ab", ""])
    assert await scorer.score(PROMPT, ["ab"]) == (Reward(value=0.5),)
    scorer.close()


async def test_a_reward_that_never_returns_holds_up_its_own_group_only() -> None:
    release = threading.Event()

    def reward(prompt: Prompt, completion: str) -> float:
        if completion == "stuck":
            release.wait()
        return 1.0

    scorer = RewardScorer(reward)
    stuck = asyncio.create_task(scorer.score(PROMPT, ["stuck"]))
    waiting = asyncio.create_task(scorer.score(PROMPT, ["waiting"]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await stuck
    assert await waiting == (Reward(value=1.0),)
    assert await scorer.score(PROMPT, ["next"]) == (Reward(value=1.0),)
    release.set()
    scorer.close()


def test_the_run_files_reward_replaces_the_environments(make_config) -> None:
    environment = PosesNothing()
    assert reward_function(make_config(), environment)(PROMPT, "abc") == 7.0  # type: ignore[arg-type]
    config = make_config(reward=Plug(path=f"{__name__}:length_reward", kwargs={"scale": 2.0}))
    assert reward_function(config, environment)(PROMPT, "abc") == 6.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("plug", "message"),
    [
        (Plug(path=f"{__name__}:no_reward"), "too many positional arguments; expected a function"),
        (Plug(path=f"{__name__}:length_reward", kwargs={"base": 1}), "unexpected keyword argument 'base'"),
        (Plug(path="no.such.module:reward"), "cannot import 'no.such.module'"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_at_start(make_config, plug: Plug, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_function(make_config(reward=plug), PosesNothing())  # type: ignore[arg-type]
