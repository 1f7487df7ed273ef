"""The processor time of one coroutine among all that a loop runs."""

import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TimedSteps(Generic[T]):
    """Awaits a coroutine, once, and counts in `cpu_s` the processor seconds of its own steps, those of coroutines that
    it awaits included. What runs while it waits does not count: other tasks, and what they, or the loop, do for it."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.cpu_s = 0.0
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            began = time.thread_time()
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value
            finally:
                self.cpu_s += time.thread_time() - began
            try:
                step = partial(self._coroutine.send, (yield waits_for))
            except BaseException as error:  # a cancellation, which is the coroutine's to see
                step = partial(self._coroutine.throw, error)
