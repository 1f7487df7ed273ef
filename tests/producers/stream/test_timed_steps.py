"""The processor time of a coroutine's own steps, on a clock that the steps set."""

import asyncio

import pytest

from penstock.producers.stream import timed_steps
from penstock.producers.stream.timed_steps import TimedSteps


@pytest.fixture
def takes(monkeypatch):
    """Lets what runs take so many seconds of the processor."""
    clock = [0.0]
    monkeypatch.setattr(timed_steps.time, "thread_time", lambda: clock[0])

    def takes(seconds: float) -> None:
        clock[0] += seconds

    return takes


async def test_only_a_coroutine_s_own_steps_count_and_those_of_what_it_awaits(takes) -> None:
    async def inner() -> int:
        takes(1.0)
        await asyncio.sleep(0)
        takes(2.0)
        return 7

    async def outer() -> int:
        takes(4.0)
        asyncio.get_running_loop().call_soon(takes, 100.0)  # runs while `inner` waits
        return await inner()

    timed = TimedSteps(outer())
    assert await timed == 7 and timed.cpu_s == 7.0


async def test_an_error_is_the_caller_s_and_its_steps_count(takes) -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        takes(1.0)
        raise ValueError("no")

    timed = TimedSteps(fails())
    with pytest.raises(ValueError, match="no"):
        await timed
    assert timed.cpu_s == 1.0


async def test_a_cancellation_reaches_the_coroutine(takes) -> None:
    begun = asyncio.Event()

    async def waits() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            takes(1.0)

    timed = TimedSteps(waits())

    async def run() -> None:
        await timed

    task = asyncio.create_task(run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert timed.cpu_s == 1.0


async def test_a_time_limit_within_it_ends_what_it_waits_for() -> None:
    async def waits() -> str:
        try:
            async with asyncio.timeout(0.0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "late"
        return "never"

    assert await TimedSteps(waits()) == "late"
