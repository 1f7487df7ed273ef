"""Rewards: the environment's or the run file's own function, called outside the event loop."""

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Thread

from penstock.producers.interfaces import Environment
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process.plugins import resolve
from penstock.schemas.prompt import Prompt, Reward

RewardFunction = Callable[[Prompt, str], float | Reward]


class RewardError(ValueError):
    """A reward function raised, or returned something that is no finite number."""


def reward_function(config: RunConfig, environment: Environment) -> RewardFunction:
    """The function that `reward` in the run file names, with its keyword arguments bound, else the environment's.

    Raises:
        ConfigError: it cannot be imported, or cannot be called with a prompt and a completion.
    """
    if config.reward is None:
        return environment.reward
    function = resolve(config.reward, "reward")
    try:
        inspect.signature(function).bind(None, None, **config.reward.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"reward.path = {config.reward.path!r}: {error}; expected a function (prompt: Prompt, completion: str, "
            "**kwargs) -> float | Reward"
        ) from None
    return functools.partial(function, **config.reward.kwargs)


class RewardScorer:
    """Scores whole groups on one thread of its own.

    A thread, because a reward may take seconds (a test suite, a symbolic comparison) and the event loop has claims to
    refresh; one call per group and not per completion, because it may also take a microsecond. With a single thread no
    reward function is called concurrently. A call that never returns is abandoned with its thread.
    """

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward
        self._loop = asyncio.get_running_loop()
        self._start()

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> tuple[Reward, ...]:
        """The reward of each completion.

        Cancelling the call abandons the thread in the middle of it; calls that wait their turn go on in a new thread.

        Raises:
            RewardError: one of them has none.
        """
        done: asyncio.Future[tuple[Reward, ...]] = self._loop.create_future()
        self._queue.put((done, prompt, completions))
        try:
            return await done
        except asyncio.CancelledError:
            self._replace_if_stuck(done)
            raise

    def close(self) -> None:
        self._queue.put(None)

    def _start(self) -> None:
        self._queue: SimpleQueue = SimpleQueue()
        self._current: asyncio.Future | None = None
        Thread(target=self._work, args=(self._queue,), name="rewards", daemon=True).start()

    def _replace_if_stuck(self, done: asyncio.Future) -> None:
        if self._current is not done:
            return
        stuck = self._queue
        self._start()
        with contextlib.suppress(Empty):
            while True:
                self._queue.put(stuck.get_nowait())
        stuck.put(None)

    def _work(self, queue: SimpleQueue) -> None:
        while (item := queue.get()) is not None:
            done, prompt, completions = item
            if done.cancelled():
                continue
            if queue is self._queue:
                self._current = done
            try:
                rewards = tuple(self._checked(prompt, completion) for completion in completions)
            except Exception as error:  # user code: any exception becomes the group's reason
                outcome: Exception | tuple[Reward, ...] = error
            else:
                outcome = rewards
            try:
                self._loop.call_soon_threadsafe(_resolve, done, outcome)
            except RuntimeError:
                return  # the loop is closed

    def _checked(self, prompt: Prompt, completion: str) -> Reward:
        reward = self._reward(prompt, completion)
        if not isinstance(reward, Reward):
            reward = Reward(value=float(reward))
        if not math.isfinite(reward.value):
            raise RewardError(f"{reward.value} for completion {completion[:80]!r}, expected a finite number")
        return reward


def _resolve(done: asyncio.Future, outcome: "Exception | tuple[Reward, ...]") -> None:
    if done.done():
        return
    if isinstance(outcome, RewardError):
        done.set_exception(outcome)
    elif isinstance(outcome, Exception):
        done.set_exception(RewardError(f"{type(outcome).__name__}: {outcome}"))
    else:
        done.set_result(outcome)
