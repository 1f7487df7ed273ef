"""Waits for conditions, with time limits that only a hung test reaches."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def wait_for(
    look: Callable[[], T],
    accept: Callable[[T], object] = bool,
    *,
    timeout_s: float = 240.0,
    poll_s: float = 0.01,
    process: subprocess.Popen[Any] | None = None,
    log: Callable[[], object] = str,
) -> T:
    """Calls `look` until `accept(result)` is true; returns that result.

    Fails after `timeout_s`, or if `process` has ended, with the last result and `log()`.
    """
    deadline = time.monotonic() + timeout_s
    while not accept(seen := look()):
        assert process is None or process.poll() is None, f"ended with {seen!r}\n{log()}"
        assert time.monotonic() < deadline, f"{seen!r} after {timeout_s:g} s\n{log()}"
        time.sleep(poll_s)
    return seen


async def until(condition: Callable[[], object], timeout_s: float = 240.0) -> None:
    """Waits until `condition()` is true; raises TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110, what is waited for happens in Redis or another task
            await asyncio.sleep(0.01)
