"""The processor time of one coroutine on a shared event loop."""

import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TimedSteps(Generic[T]):
    """Awaits a coroutine, once, and counts in `cpu_s` the processor seconds of its own steps, including coroutines that
    it awaits. What runs while it waits does not count: other tasks and the event loop, even on its behalf."""

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
            except BaseException as error:  # a cancellation, which the coroutine must see
                step = partial(self._coroutine.throw, error)
