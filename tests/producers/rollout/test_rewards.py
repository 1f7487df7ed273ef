"""Rewards away from the event loop, and what becomes of those that misbehave."""

import asyncio
import functools
import math
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

from penstock.producers.interfaces import Environment, RolloutFacts
from penstock.producers.rollout import scoring
from penstock.producers.rollout.rewards import (
    REWARD_THREADS,
    RewardError,
    component,
    reward_components,
    reward_threads,
)
from penstock.producers.rollout.scoring import RewardScorer, Scores
from penstock.schemas.config import ConfigError, Plug, RewardConfig, RunConfig, WeightedReward
from penstock.schemas.process.plugins import construct, ends_caller
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import FinishReason, shown_traceback

PROMPT = Prompt(text="1+1=", answer="2")


def length_reward(prompt: Prompt, completion: str, *, scale: float = 1.0) -> float:
    return scale * len(completion)


def scorer_of(function: Any, **limits: Any) -> RewardScorer:
    return RewardScorer([component(function)], RewardConfig(**limits))


async def scored(function: Any, *completions: str, **limits: Any) -> Scores:
    """What one function makes of one group's completions."""
    scorer = scorer_of(function, **limits)
    try:
        return await scorer.score(PROMPT, completions)
    finally:
        scorer.close()


def no_reward(prompt: Prompt) -> float:
    return 0.0


class PosesNothing:
    num_evaluation_prompts = 0

    def reward(self, prompt: Prompt, completion: str) -> float:
        return 7.0


async def test_rewards_run_side_by_side_outside_the_event_loops_thread() -> None:
    together = threading.Barrier(REWARD_THREADS)  # nobody passes before all of them are inside
    threads = set()

    def reward(prompt: Prompt, completion: str) -> float:
        together.wait()
        threads.add(threading.current_thread())
        return float(completion)

    scorer = scorer_of(reward)
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
    scorer = scorer_of(environment.reward)
    await asyncio.gather(*(scorer.score(PROMPT, ["a"] * 4) for _ in range(4)))
    assert environment.most == 1
    scorer.close()


def test_the_number_of_threads_is_the_environments_the_functions_or_the_default() -> None:
    def judged(prompt: Prompt, completion: str, *, scale: float) -> float:
        return scale

    judged.reward_threads = 64  # type: ignore[attr-defined]
    assert reward_threads(OneAtATime().reward, "reward") == 1
    assert reward_threads(functools.partial(judged, scale=2.0), "reward") == 64
    assert reward_threads(length_reward, "reward") == REWARD_THREADS
    judged.reward_threads = 0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^reward: reward_threads = 0, expected a whole number from 1"):
        reward_threads(judged, "reward")  # type: ignore[arg-type]


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
        assert values(await scored(function, "1", "2", "3", "4")) == [scale * n for n in (1, 2, 3, 4)]


async def test_a_coroutine_reward_that_raises_ends_its_siblings_and_shows_its_completion() -> None:
    ended = []

    async def reward(prompt: Prompt, completion: str) -> float:
        try:
            await asyncio.sleep(0 if completion == "bad" else 60)
            raise ZeroDivisionError("no")
        finally:
            ended.append(completion)

    with pytest.raises(RewardError, match="ZeroDivisionError: no") as raised:
        await scored(reward, "slow", "bad")
    assert "while scoring the completion 'bad'" in shown_traceback(raised.value.__cause__)
    assert sorted(ended) == ["bad", "slow"]


class Panic(BaseException):
    """As a Rust extension raises it."""


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def leave(error: BaseException) -> NoReturn:
    raise error


async def test_whatever_a_reward_lets_out_is_its_groups_reason(make_config) -> None:
    judge: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    judge.cancel()

    async def gives_up(prompt: Prompt, completion: str) -> float:
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        return await asyncio.sleep(60, 1.0)

    for error, reason in [
        (SystemExit(3), "SystemExit: 3"),
        (Panic("index 3 of 2"), "Panic: index 3 of 2"),
        (asyncio.CancelledError(), "CancelledError"),
        (Unreadable(), "Unreadable: its text cannot be shown: ZeroDivisionError"),
        (Leaving(), "Leaving: its text cannot be shown: SystemExit"),
        (Frozen(503), "Frozen: 503"),
        (ValueError("x" * 30_000_000), "ValueError: xxx.*30,000,0.. characters"),
    ]:

        async def judged(prompt: Prompt, completion: str, error: BaseException = error) -> float:
            leave(error)

        for function in (lambda prompt, completion, error=error: leave(error), judged):
            with pytest.raises(RewardError, match=f"^{reason}") as raised:
                await scored(function, "a", "b")
            assert len(str(raised.value)) <= 500 and len(shown_traceback(raised.value.__cause__)) < 10_000
            assert "in leave" in shown_traceback(raised.value.__cause__), "the frames stay"

    async def shared(prompt: Prompt, completion: str) -> float:
        return await judge

    for function in (shared, gives_up):
        for limits in ({}, {"timeout_s": 60.0, "retries": 1}):
            with pytest.raises(RewardError, match=r"^CancelledError"):
                await scored(function, "a", "b", **limits)


async def test_a_cancellation_of_our_own_and_ctrl_c_pass_through_a_reward() -> None:
    begun = asyncio.Event()

    async def slow(prompt: Prompt, completion: str) -> float:
        begun.set()
        return await asyncio.sleep(60, 1.0)

    scoring = asyncio.create_task(scorer_of(slow).score(PROMPT, ["a", "b"]))
    await begun.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert scoring.cancelled() and ends_caller(KeyboardInterrupt()) and not ends_caller(SystemExit())


async def test_where_the_loop_handles_ctrl_c_a_keyboard_interrupt_is_the_rewards_own_failure() -> None:
    async def judged(prompt: Prompt, completion: str) -> float:
        raise KeyboardInterrupt

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        with pytest.raises(RewardError, match=r"^KeyboardInterrupt"):
            await scored(judged, "a", "b")
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def test_a_judge_is_asked_again_as_often_and_by_as_many_at_once_as_the_run_file_says(monkeypatch) -> None:
    monkeypatch.setattr(scoring, "RETRY_PAUSE_S", 0.001)
    script: dict[str, list[str]] = {}
    asked: list[str] = []
    inside = [0]

    async def judge(prompt: Prompt, completion: str) -> float:
        asked.append(completion)
        inside.append(inside[-1] + 1)
        try:
            does = script[completion].pop(0) if script.get(completion) else "answer"
            await (asyncio.Event().wait() if does == "hang" else asyncio.sleep(0))
            if does == "fail":
                raise ConnectionError("503")
            return 1.0
        finally:
            inside.append(inside[-1] - 1)

    script.update(a=["fail", "hang"], b=["hang"])
    rewards = await scored(judge, *"abcdefgh", timeout_s=0.2, retries=20, concurrency=3)
    assert rewards == (Reward(value=1.0),) * 8 and max(inside) == 3
    assert asked.count("a") >= 3 and asked.count("b") >= 2
    for does, limit_s, reason in [
        ("fail", 5.0, r"ConnectionError: 503 \(tried 3 times\)"),
        ("hang", 0.05, r"TimeoutError: no answer within 0.05 s \(reward.timeout_s\) \(tried 3 times\)"),
    ]:
        asked.clear()
        script["b"] = [does] * 3
        with pytest.raises(RewardError, match=reason):
            await scored(judge, "b", timeout_s=limit_s, retries=2)
        assert asked == ["b"] * 3


async def test_a_pause_before_a_retry_holds_no_place_of_another_call(monkeypatch) -> None:
    monkeypatch.setattr(scoring, "RETRY_PAUSE_S", 600.0)
    others = asyncio.Event()

    async def reward(prompt: Prompt, completion: str) -> float:
        if completion == "bad":
            raise ConnectionError("away")
        others.set()
        return 1.0

    scoring_both = asyncio.create_task(scorer_of(reward, concurrency=1, retries=1).score(PROMPT, ["bad", "good"]))
    await asyncio.wait_for(others.wait(), 60)
    scoring_both.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring_both


@pytest.mark.filterwarnings("error")
async def test_a_coroutine_from_a_function_that_is_none_is_told_so() -> None:
    async def late() -> float:
        return 1.0

    with pytest.raises(RewardError, match="a coroutine, which is awaited only if it is an `async def` itself"):
        await scored(lambda prompt, completion: late(), "x")


async def test_a_reward_that_no_record_holds_is_an_error_that_shows_the_completion() -> None:
    def made_of(*names: str) -> Reward:
        return Reward(value=1.0, parts=dict.fromkeys(names, 1.0))

    number = " for completion 'x', expected a finite number of at most 1e+09"
    odd: list[Any] = [math.nan, math.inf, -1e10, 10**400, None, "much", b"1", Reward(value=1.0, parts={"a": math.nan})]
    for value, message in [
        *((value, repr(value)[:80] + number) for value in odd),
        (made_of(*(f"part {n}" for n in range(33))), "parts has 33 names, expected at most 32"),
        (made_of("n" * 65), f"parts has the name '{'n' * 64}' of 65 characters, expected 1 to 64 printable ones"),
        (made_of("a\nb"), "parts has the name 'a\\nb' of 3 characters"),
    ]:
        with pytest.raises(RewardError, match=re.escape(message)) as raised:
            await scored(lambda prompt, completion, value=value: value, "x")
        assert "completion 'x'" in str(raised.value)
    most = made_of(*(f"{n:064}" for n in range(32)))
    assert await scored(lambda prompt, completion: most, "x") == (most,)


async def test_a_reward_that_never_returns_holds_up_its_own_group_only() -> None:
    release = threading.Event()

    def reward(prompt: Prompt, completion: str) -> float:
        if completion == "stuck":
            release.wait()
        return 1.0

    reward.reward_threads = 2  # type: ignore[attr-defined]
    scorer = scorer_of(reward)
    stuck = asyncio.create_task(scorer.score(PROMPT, ["stuck"] * 3))
    waiting = asyncio.create_task(scorer.score(PROMPT, ["waiting"]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await stuck
    assert await waiting == (Reward(value=1.0),)
    assert await scorer.score(PROMPT, ["next"]) == (Reward(value=1.0),)
    release.set()
    scorer.close()


async def score(config: RunConfig, *completions: str, environment: object = None, **facts: int) -> list[Reward]:
    """What the rewards of a run file make of one group's completions."""
    components = reward_components(config, environment or PosesNothing(), "environment")  # type: ignore[arg-type]
    scorer = RewardScorer(components, config.reward)
    try:
        return list(await scorer.score(PROMPT, completions, [known(len(text), **facts) for text in completions]))
    finally:
        scorer.close()


def known(num_tokens: int, max_tokens: int = 9) -> RolloutFacts:
    reason: FinishReason = "length" if num_tokens == max_tokens else "stop"
    return RolloutFacts(num_prompt_tokens=4, num_tokens=num_tokens, max_tokens=max_tokens, finish_reason=reason)


def own(name: str, **fields: object) -> dict[str, object]:
    return {"path": f"{__name__}:{name}", **fields}


def values(rewards: Sequence[Reward]) -> list[float]:
    return [reward.value for reward in rewards]


def test_a_reward_that_cannot_be_called_is_refused_at_start(make_config) -> None:
    component = WeightedReward(name="a", path=f"{__name__}:no_reward")
    for plug, message in [
        (own("no_reward"), "too many positional arguments; expected a function"),
        (
            own("trl_reward"),
            r"parameters \['prompts', .*: a function for TRL, which docs/coming-from.md#rewards carries",
        ),
        (own("length_reward", kwargs={"base": 1}), "unexpected keyword argument 'base'"),
        (own("cost_of_facts", kwargs={"facts": 1}), "multiple values for keyword argument 'facts'"),
        ({"path": "builtins:max"}, "no signature found for builtin .*; expected a function"),
        ({"path": "no.such.module:reward"}, "cannot import 'no.such.module'"),
        (own("length_reward", retries=2), "reward.retries = 2: it is for coroutines; expected an `async def` reward"),
        ({"components": (component,)}, r"reward.components\[0\].path = .*no_reward': too many positional arguments"),
    ]:
        with pytest.raises(ConfigError, match=message):
            reward_components(make_config(reward=RewardConfig(**plug)), PosesNothing(), "environment")  # type: ignore[arg-type]


def trl_reward(prompts, completions, answer, **kwargs):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def cost_of_facts(prompt: Prompt, completion: str, *, facts: RolloutFacts, cost: float = 1.0) -> float:
    return -cost * facts.num_tokens - 100 * facts.is_truncated


async def relative(prompt: Prompt, completions: list[str], facts: list[RolloutFacts]) -> list[float]:
    longest = max(each.num_tokens for each in facts)
    return [
        each.num_tokens - longest + 0.5 * (text == prompt.answer) for text, each in zip(completions, facts, strict=True)
    ]


def rank(prompt: Prompt, completions: list[str]) -> list[float]:
    return [float(sorted(completions).index(completion)) for completion in completions]


class Knowing(PosesNothing):
    """Takes facts, as a method of an environment."""

    def prompt(self, index: int) -> Prompt:
        return PROMPT

    def evaluation_prompt(self, n: int) -> Prompt:
        return PROMPT

    def reward(self, prompt: Prompt, completion: str, *, facts: RolloutFacts) -> float:  # type: ignore[override]
        return facts.num_tokens / facts.max_tokens


def knowing(*, seed: int) -> Knowing:
    return Knowing()


async def test_a_function_with_a_parameter_facts_gets_those_of_its_completion(make_config) -> None:
    plug = RewardConfig(**own("cost_of_facts", kwargs={"cost": 2.0}))  # type: ignore[arg-type]
    assert values(await score(make_config(reward=plug), "ab", "abc", max_tokens=3)) == [-4.0, -106.0]
    environment = construct(Plug(path=f"{__name__}:knowing"), "environment", Environment, seed=0)
    assert values(await score(make_config(), "ab", "abc", environment=environment, max_tokens=4)) == [0.5, 0.75]


async def test_a_function_of_completions_scores_all_siblings_at_once(make_config) -> None:
    for name, expected in (("relative", [-1.5, -2.0, 0.0]), ("rank", [1.0, 0.0, 2.0])):
        config = make_config(reward=RewardConfig(**own(name)))  # type: ignore[arg-type]
        assert values(await score(config, "2", "1", "222")) == expected


async def test_a_group_of_another_number_of_rewards_is_an_error() -> None:
    for found, message in [
        ([1.0], "1 rewards for a group, expected 2, one for each completion"),
        (1.0, "1.0 for a group, expected a list of 2 rewards"),
        ([1.0, math.nan], "nan for completion 'b', expected a finite number"),
    ]:
        with pytest.raises(RewardError, match=message):
            await scored(lambda prompt, completions, found=found: found, "a", "b")


def exact(prompt: Prompt, completion: str) -> Reward:
    return Reward(value=float(completion == prompt.answer), parts={"seen": 1.0})


def weights(**of: float) -> RewardConfig:
    paths = {"right": f"{__name__}:exact", "rank": f"{__name__}:rank", "own": "environment"}
    return RewardConfig(components=tuple(WeightedReward(name=n, path=paths[n], weight=w) for n, w in of.items()))


async def test_components_are_summed_by_weight_and_each_is_a_part_without_its_weight(make_config) -> None:
    config = make_config(reward=weights(right=2.0, rank=-0.5, own=0.0))
    assert await score(config, "2", "1") == [
        Reward(value=1.5, parts={"right": 1.0, "right/seen": 1.0, "rank": 1.0, "own": 7.0}),
        Reward(value=0.0, parts={"right": 0.0, "right/seen": 1.0, "rank": 0.0, "own": 7.0}),
    ]
    balanced = await score(make_config(reward=weights(right=1.0, rank=-1.0)), "1", "2")
    assert [reward.value for reward in balanced] == [0.0, 0.0], "weights may cancel each other: nothing divides by them"
    assert [reward.parts["rank"] for reward in balanced] == [0.0, 1.0]


def test_components_that_contradict_or_make_no_reward_are_refused() -> None:
    right, odd = weights(right=1.0).components, "components have the weights .*, expected finite numbers"
    for make, message in [
        (lambda: RewardConfig(components=right * 2), "the names .*, expected different ones"),
        (lambda: RewardConfig(components=right, path="a:b"), "path = 'a:b' with components: expected one of"),
        (lambda: weights(own=math.inf), odd),
        (lambda: weights(right=1.0, own=math.nan), odd),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
