"""The producer's event loop, whose deadlines leave out the time in which it stood still."""

import asyncio
import time

import pytest

from penstock.producers.observe import running_loop
from penstock.producers.observe.running_loop import RunningLoop, running_s


def in_running_loop(work):
    with asyncio.Runner(loop_factory=RunningLoop) as runner:
        return runner.run(work())


def test_a_deadline_leaves_out_an_hour_in_which_the_process_was_stopped(monkeypatch, caplog) -> None:
    asleep_s = 0.0
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: time.monotonic() + asleep_s)

    async def work() -> float:
        nonlocal asleep_s
        asyncio.get_running_loop().watch()  # type: ignore[attr-defined]
        began = running_s()
        async with asyncio.timeout(600):
            asleep_s += 3600
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(600)
        return running_s() - began

    assert in_running_loop(work) < 600
    assert "this process stood still for 3599 s (it was stopped, or the machine slept)" in caplog.text


def test_a_coroutine_that_blocks_the_loop_is_named_while_it_does(monkeypatch, caplog) -> None:
    monkeypatch.setattr(running_loop, "BLOCKED_S", 0.2)
    monkeypatch.setattr(running_loop, "TICK_S", 0.05)

    async def work() -> None:
        asyncio.get_running_loop().watch()  # type: ignore[attr-defined]
        async with asyncio.timeout(0.5):
            while "blocked (" not in caplog.text:
                time.sleep(0.01)  # noqa: ASYNC251  # a judge asked without `await`
            await asyncio.sleep(0)

    in_running_loop(work)
    assert f"blocked ({__file__}:" in caplog.text and "expected a coroutine that awaits" in caplog.text
