"""Scores groups: coroutine rewards on the event loop, others on threads."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import chain
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TypeVar

from penstock.producers.interfaces import RolloutFacts
from penstock.producers.rollout.rewards import RewardCall, RewardComponent, RewardError, explained, weighted
from penstock.schemas.config import RewardConfig
from penstock.schemas.process.cancellation import gather_or_cancel
from penstock.schemas.process.plugins import ends_caller
from penstock.schemas.prompt import Prompt, Reward

log = logging.getLogger(__name__)

THREAD_NAME = "rewards"
"""Of the threads that call rewards."""
RETRY_PAUSE_S = 0.25
"""Before the first retry of a coroutine; each further one waits twice as long."""

T = TypeVar("T")
Scores = tuple[Reward, ...]


class RewardScorer:
    """Scores whole groups, by every component at once.

    A coroutine function is awaited on the event loop, at most `reward.concurrency` calls at a time over all components.
    Any other function runs on `RewardComponent.num_threads` threads, because a reward may take seconds (a test suite, a
    judge) and the event loop has claims to refresh. The threads share a group's calls, which are handed over together
    and answered together: a reward may also take a microsecond. A call that never returns is abandoned with its thread.
    """

    def __init__(self, components: Sequence[RewardComponent], limits: RewardConfig) -> None:
        self._components = components
        self._threads = [None if each.is_async else _Threads(each.num_threads) for each in components]
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.concurrency)

    async def score(
        self, prompt: Prompt, completions: Sequence[str], facts: Sequence[RolloutFacts] | None = None
    ) -> Scores:
        """Returns the reward of each completion. facts: of each completion, if a component takes them.

        Cancelling the call abandons the threads that are in the middle of it; others take their places.

        Raises:
            RewardError: one of them has none; the others are given up.
        """
        works = [
            self._one(each, threads, list(each.calls(prompt, completions, facts)))
            for each, threads in zip(self._components, self._threads, strict=True)
        ]
        if not self._components[0].name:
            return await works[0]
        found = await gather_or_cancel(works)
        return tuple(weighted(self._components, rewards) for rewards in zip(*found, strict=True))

    def close(self) -> None:
        for threads in filter(None, self._threads):
            threads.close()

    async def _one(self, component: RewardComponent, threads: "_Threads | None", calls: list[RewardCall]) -> Scores:
        try:
            if threads is not None:
                return await threads.score(calls)
            return tuple(chain.from_iterable(await gather_or_cancel(map(self._await, calls))))
        except BaseException as error:
            if ends_caller(error):
                raise
            failure = explained(error)  # of a coroutine that cancels its own task, too
            if component.name:
                failure.args = (f"{component.name}: {failure}",)
            raise failure from failure.__cause__

    async def _await(self, call: RewardCall) -> Scores:
        async def once() -> Scores:
            return call.checked(await call.function())

        limits = self._limits
        return await tried(
            "reward",
            once,
            call.failure,
            self._slots,
            timeout_s=limits.timeout_s,
            retries=limits.retries,
            setting=" (reward.timeout_s)",
        )


async def tried(
    what: str,
    function: Callable[[], Awaitable[T]],
    failure: Callable[[BaseException, int], RewardError],
    slots: asyncio.Semaphore,
    *,
    timeout_s: float | None,
    retries: int,
    setting: str = "",
) -> T:
    """Awaits a call for up to `timeout_s` and, after each failure, another one, up to `retries` times.

    what: who is called, for messages. setting: what is said of the time limit.
    failure: makes the error from the exception and the number of tries.
    slots: bound the calls at once.

    Raises:
        RewardError: from the call, at once: its answer cannot be used. Or the `failure` of the last try.
    """
    tries, num_tries = 0, 1 + retries
    while True:
        tries += 1
        limit = asyncio.timeout(timeout_s)
        try:
            async with slots, limit:
                return await function()
        except BaseException as error:  # user code: any exception becomes the group's reason
            if ends_caller(error):
                raise
            late = TimeoutError(f"no answer within {timeout_s} s{setting}")
            failed = failure(late if limit.expired() else error, tries)
            if isinstance(error, RewardError) or tries == num_tries:
                break
        log.warning("%s: try %d of %d: %s", what, tries, num_tries, failed)
        await asyncio.sleep(RETRY_PAUSE_S * 2 ** (tries - 1))
    raise failed


class _Job:
    """One group's calls, which threads share. num_running: threads that are inside a call."""

    def __init__(self, calls: Sequence[RewardCall]) -> None:
        self.waiting = deque(enumerate(calls))
        self.rewards: dict[int, Scores] = {}
        self.num_calls = len(calls)
        self.num_running = 0
        self.done: Future[Scores] = Future()


class _Threads:
    """Threads that call one component's function."""

    def __init__(self, num_threads: int) -> None:
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = Lock()
        self._num_threads = num_threads
        self._start(num_threads)

    async def score(self, calls: Sequence[RewardCall]) -> Scores:
        job = _Job(calls)
        for _ in range(min(len(calls), self._num_threads)):
            self._queue.put(job)
        try:
            return await asyncio.wrap_future(job.done)
        except asyncio.CancelledError:
            with self._lock:
                job.waiting.clear()
                if job.done.cancel():
                    self._start(job.num_running)
            raise

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _start(self, num_threads: int) -> None:
        for _ in range(num_threads):
            Thread(target=self._work, name=THREAD_NAME, daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not self._share(job):
                return

    def _share(self, job: _Job) -> bool:
        """Makes calls of a job until none is left; returns False if this thread was replaced meanwhile."""
        while True:
            with self._lock:
                if not job.waiting:
                    return True
                n, call = job.waiting.popleft()
                job.num_running += 1
            failure = None
            try:
                job.rewards[n] = call.checked(call.function())
            except BaseException as error:  # user code; neither a signal nor a cancellation reaches this thread
                failure = call.failure(error)
            with self._lock:
                if job.done.cancelled():
                    return False
                job.num_running -= 1
                if failure is not None:
                    job.waiting.clear()
                elif len(job.rewards) < job.num_calls:
                    continue
            with suppress(InvalidStateError):  # another call has failed, or nobody waits any more
                if failure is not None:
                    job.done.set_exception(failure)
                else:
                    job.done.set_result(tuple(chain.from_iterable(job.rewards[n] for n in range(job.num_calls))))
