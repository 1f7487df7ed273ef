"""Rewards away from the event loop, and what becomes of those that misbehave."""

import asyncio
import functools
import math
import re
import threading
import time

import pytest

from penstock.producers.rollout.rewards import (
    REWARD_THREADS,
    RewardError,
    RewardScorer,
    reward_function,
    reward_threads,
)
from penstock.schemas.config import ConfigError, Plug
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import shown_traceback

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


async def test_rewards_run_side_by_side_outside_the_event_loops_thread() -> None:
    together = threading.Barrier(REWARD_THREADS)  # nobody passes before all of them are inside
    threads = set()

    def reward(prompt: Prompt, completion: str) -> float:
        together.wait()
        threads.add(threading.current_thread())
        return float(completion)

    scorer = RewardScorer(reward)
    groups = [[str(8 * group + n) for n in range(8)] for group in range(REWARD_THREADS // 8)]
    scored = await asyncio.gather(*(scorer.score(PROMPT, group) for group in groups))
    assert [[reward.value for reward in group] for group in scored] == [[float(c) for c in group] for group in groups]
    assert len(threads) == REWARD_THREADS and threading.current_thread() not in threads
    scorer.close()


class OneAtATime:
    """Not thread-safe, and says so."""

    reward_threads = 1

    def __init__(self) -> None:
        self.inside = self.most = 0

    def reward(self, prompt: Prompt, completion: str) -> float:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.001)
        self.inside -= 1
        return 1.0


async def test_an_environment_that_is_not_thread_safe_is_never_called_twice_at_a_time() -> None:
    environment = OneAtATime()
    scorer = RewardScorer(environment.reward)
    await asyncio.gather(*(scorer.score(PROMPT, ["a"] * 4) for _ in range(4)))
    assert environment.most == 1
    scorer.close()


def test_the_number_of_threads_is_the_environments_the_functions_or_the_default() -> None:
    def judged(prompt: Prompt, completion: str, *, scale: float) -> float:
        return scale

    judged.reward_threads = 64  # type: ignore[attr-defined]
    assert reward_threads(OneAtATime().reward) == 1
    assert reward_threads(functools.partial(judged, scale=2.0)) == 64
    assert reward_threads(length_reward) == REWARD_THREADS
    judged.reward_threads = 0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="reward_threads = 0, expected a whole number from 1"):
        reward_threads(judged)  # type: ignore[arg-type]


async def test_coroutine_rewards_are_awaited_side_by_side_on_the_event_loop() -> None:
    together = asyncio.Barrier(4)

    class Judge:
        async def __call__(self, prompt: Prompt, completion: str) -> float:
            await together.wait()
            return float(completion)

    async def reward(prompt: Prompt, completion: str, *, scale: float) -> Reward:
        await together.wait()
        return Reward(value=scale * float(completion))

    for function, scale in ((Judge(), 1.0), (functools.partial(reward, scale=2.0), 2.0)):
        scorer = RewardScorer(function)
        scored = await scorer.score(PROMPT, ["1", "2", "3", "4"])
        assert [reward.value for reward in scored] == [scale * n for n in (1, 2, 3, 4)]
        scorer.close()


async def test_a_coroutine_reward_that_raises_ends_its_siblings_and_shows_its_completion() -> None:
    ended = []

    async def reward(prompt: Prompt, completion: str) -> float:
        try:
            await asyncio.sleep(0 if completion == "bad" else 60)
            raise ZeroDivisionError("no")
        finally:
            ended.append(completion)

    scorer = RewardScorer(reward)
    with pytest.raises(RewardError, match="ZeroDivisionError: no") as raised:
        await scorer.score(PROMPT, ["slow", "bad"])
    assert "while scoring the completion 'bad'" in shown_traceback(raised.value.__cause__)
    assert sorted(ended) == ["bad", "slow"]
    scorer.close()


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_from_a_function_that_is_none_is_told_so() -> None:
    async def late() -> float:
        return 1.0

    scorer = RewardScorer(lambda prompt, completion: late())
    with pytest.raises(RewardError, match="a coroutine, which is awaited only if it is an `async def` itself"):
        await scorer.score(PROMPT, ["x"])
    scorer.close()


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -1e10, None, "much", "0.5", b"1", Reward(value=1.0, parts={"a": math.nan})]
)
async def test_a_reward_that_no_record_holds_is_an_error_that_shows_the_completion(value: float) -> None:
    scorer = RewardScorer(lambda prompt, completion: value)
    message = re.escape(repr(value)[:80]) + " for completion 'x', expected a finite number of at most 1e\\+09"
    with pytest.raises(RewardError, match=message):
        await scorer.score(PROMPT, ["x"])
    scorer.close()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([f"part {n}" for n in range(33)], "parts has 33 names, expected at most 32"),
        (["n" * 65], f"parts has the name '{'n' * 64}' of 65 characters, expected 1 to 64 printable ones"),
        ([""], "parts has the name '' of 0 characters"),
        (["a\nb"], "parts has the name 'a\\nb' of 3 characters"),
    ],
)
async def test_parts_that_no_line_shows_are_an_error_that_shows_the_completion(names: list[str], message: str) -> None:
    scorer = RewardScorer(lambda prompt, completion: Reward(value=1.0, parts=dict.fromkeys(names, 1.0)))
    with pytest.raises(RewardError, match=re.escape(message) + ".*, in the reward of completion 'x'"):
        await scorer.score(PROMPT, ["x"])
    scorer.close()


async def test_a_reward_may_have_as_many_and_as_long_parts_as_a_line_shows() -> None:
    most = Reward(value=1.0, parts={f"{n:064}": 1.0 for n in range(32)})
    scorer = RewardScorer(lambda prompt, completion: most)
    assert await scorer.score(PROMPT, ["x"]) == (most,)
    scorer.close()


async def test_a_reward_that_raises_names_its_error_and_the_scorer_lives_on() -> None:
    def reward(prompt: Prompt, completion: str) -> float:
        return 1 / len(completion)

    scorer = RewardScorer(reward)
    with pytest.raises(RewardError, match="ZeroDivisionError: division by zero"):
        await scorer.score(PROMPT, ["ab", ""])
    assert await scorer.score(PROMPT, ["ab"]) == (Reward(value=0.5),)
    scorer.close()


@pytest.mark.parametrize("threads", [1, 2, None])
async def test_a_reward_that_never_returns_holds_up_its_own_group_only(threads) -> None:
    release = threading.Event()

    def reward(prompt: Prompt, completion: str) -> float:
        if completion == "stuck":
            release.wait()
        return 1.0

    if threads is not None:
        reward.reward_threads = threads  # type: ignore[attr-defined]
    scorer = RewardScorer(reward)
    stuck = asyncio.create_task(scorer.score(PROMPT, ["stuck"] * 3))
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
