"""Rewards: the environment's or the run file's own function; coroutines on the event loop, others on threads."""

import asyncio
import functools
import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from penstock.producers.interfaces import Environment
from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process.cancellation import cancel_and_wait
from penstock.schemas.process.plugins import resolve
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import MAX_REWARD, check_part_names

RewardFunction = Callable[[Prompt, str], float | Reward | Awaitable[float | Reward]]

REWARD_THREADS = 16
"""Calls at once of a reward that is no coroutine. Its owner may name another number: 1 if it is not thread-safe."""


class RewardError(ValueError):
    """A reward function raised (`__cause__`), or returned something that is no finite number."""


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


def reward_threads(reward: RewardFunction) -> int:
    """The attribute `reward_threads` of the environment or of the function itself, else `REWARD_THREADS`.

    Raises:
        ConfigError: it is no number from 1.
    """
    function = reward.func if isinstance(reward, functools.partial) else reward
    owner = getattr(function, "__self__", function)
    threads = getattr(owner, "reward_threads", REWARD_THREADS)
    if not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"{owner!r}: reward_threads = {threads!r}, expected a whole number from 1")
    return threads


class _Group:
    """The completions of one group that are being scored."""

    def __init__(self, prompt: Prompt, completions: Sequence[str], done: "asyncio.Future[tuple[Reward, ...]]") -> None:
        self.prompt = prompt
        self.done = done
        self.waiting = deque(enumerate(completions))
        self.rewards: dict[int, Reward] = {}
        self.num_completions = len(completions)
        self.num_running = 0
        """Threads inside a call of the reward function for it."""
        self.is_over = False
        """All are scored, or one of them cannot be."""
        self.is_abandoned = False


class RewardScorer:
    """Scores whole groups: a coroutine function on the event loop, all completions at once; any other function on
    `reward_threads` threads, because a reward may take seconds (a test suite, a judge) and the event loop has claims to
    refresh.

    The threads take turns over a group's completions, which are handed over together and answered together: a reward
    may also take a microsecond. A call that never returns is abandoned with its thread.

    Raises:
        ConfigError: see `reward_threads`.
    """

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Group | None] = SimpleQueue()
        self._lock = Lock()
        self._is_async = _is_coroutine_function(reward)
        self._num_threads = 0 if self._is_async else reward_threads(reward)
        self._start(self._num_threads)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> tuple[Reward, ...]:
        """The reward of each completion.

        Cancelling the call abandons the threads that are in the middle of it; others take their places.

        Raises:
            RewardError: one of them has none; the others are given up.
        """
        if self._is_async:
            return await self._await_all(prompt, completions)
        group = _Group(prompt, completions, self._loop.create_future())
        for _ in range(min(len(completions), self._num_threads)):
            self._queue.put(group)
        try:
            return await group.done
        except asyncio.CancelledError:
            with self._lock:
                group.is_over = group.is_abandoned = True
                self._start(group.num_running)
            raise

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)

    async def _await_all(self, prompt: Prompt, completions: Sequence[str]) -> tuple[Reward, ...]:
        async def one(completion: str) -> Reward:
            try:
                return checked(await self._reward(prompt, completion), _named(completion))  # type: ignore[misc]
            except Exception as error:  # user code: any exception becomes the group's reason
                failure = _explained(error, completion)
            raise failure

        tasks = [asyncio.ensure_future(one(completion)) for completion in completions]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            await cancel_and_wait(tasks)

    def _start(self, num_threads: int) -> None:
        for _ in range(num_threads):
            Thread(target=self._work, name="rewards", daemon=True).start()

    def _work(self) -> None:
        while (group := self._queue.get()) is not None:
            try:
                if not self._share(group):
                    return
            except RuntimeError:
                return  # the loop is closed

    def _share(self, group: _Group) -> bool:
        """Scores completions of a group until none is left; False if this thread was replaced meanwhile."""
        while True:
            with self._lock:
                if group.is_over or not group.waiting:
                    return True
                n, completion = group.waiting.popleft()
                group.num_running += 1
            failure = None
            try:
                group.rewards[n] = checked(self._reward(group.prompt, completion), _named(completion))
            except Exception as error:  # user code: any exception becomes the group's reason
                failure = _explained(error, completion)
            with self._lock:
                if group.is_abandoned:
                    return False
                group.num_running -= 1
                over = failure is not None or len(group.rewards) == group.num_completions
                if group.is_over or not over:
                    continue
                group.is_over = True
            self._loop.call_soon_threadsafe(_resolve, group, failure)


def checked(reward: Any, of: str) -> Reward:
    """What the user's code returned as a reward, as a `Reward`. of: what it is the reward of, for the message.

    Raises:
        RewardError: not a number that a record can hold, or parts that `check_part_names` refuses.
    """
    if inspect.iscoroutine(reward):
        reward.close()
        raise RewardError("the function returned a coroutine, which is awaited only if it is an `async def` itself")
    found = reward
    try:
        if isinstance(found, str | bytes):
            raise TypeError("float() reads numbers in text")
        if not isinstance(found, Reward):
            found = Reward(value=float(found))
        fits = abs(found.value) <= MAX_REWARD and all(map(math.isfinite, found.parts.values()))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        shown, most = repr(reward)[:80], f"of at most {MAX_REWARD:g}"
        raise RewardError(f"{shown} for {of}, expected a finite number {most}, or a Reward of such numbers")
    try:
        check_part_names(found.parts, "parts")
    except ValueError as error:
        raise RewardError(f"{error}, in the reward of {of}") from None
    return found


def _named(completion: str) -> str:
    return f"completion {completion[:80]!r}"


def _explained(error: Exception, completion: str) -> RewardError:
    """The error of a group; the user's own is its cause, with a note of the completion that it arose from."""
    error.add_note(f"while scoring the completion {completion[:200]!r}")
    if isinstance(error, RewardError):
        return error
    explained = RewardError(f"{type(error).__name__}: {error}")
    explained.__cause__ = error
    return explained


def _is_coroutine_function(function: Any) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _resolve(group: _Group, failure: RewardError | None) -> None:
    if group.done.done():
        return
    if failure is not None:
        group.done.set_exception(failure)
    else:
        group.done.set_result(tuple(group.rewards[n] for n in range(group.num_completions)))
