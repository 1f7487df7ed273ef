"""One way to live through a Redis that is away, full or locked."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import pytest
from redis import exceptions
from redis.backoff import EqualJitterBackoff

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream import connection as module
from penstock.producers.stream.connection import FORGET_S, AdaptiveTimeout, ProducerConnection
from penstock.schemas.process import outage
from penstock.schemas.process.outage import RedisGoneError


@pytest.fixture
def link_for(metrics: ProducerMetrics, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], ProducerConnection]:
    """Makes a connection that waits for so many seconds."""
    monkeypatch.setattr(outage, "BACKOFF", EqualJitterBackoff(cap=0.002, base=0.001))
    return lambda outage_s: ProducerConnection.open("unix:///none", outage_s=outage_s, metrics=metrics)


@pytest.fixture
def link(link_for: Callable[[float], ProducerConnection]) -> ProducerConnection:
    return link_for(0.2)


def failing(*errors: Exception) -> Callable[[], Awaitable[str]]:
    """A command that raises these in turn and is answered then."""
    left = list(errors)

    async def command() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    return command


def num_errors(metrics: ProducerMetrics, kind: str) -> float:
    return metrics.registry.get_sample_value("penstock_stream_errors_total", {"kind": kind}) or 0.0


async def test_an_outage_is_one_line_when_it_begins_and_one_when_it_ends(link_for, metrics, caplog) -> None:
    caplog.set_level(logging.INFO)
    link = link_for(30.0)
    errors = exceptions.ConnectionError("refused"), exceptions.TimeoutError("slow"), ConnectionResetError("reset")
    assert await link.retrying(failing(*errors)) == "answer"
    away, back = caplog.messages
    assert away == "Redis at /none is away (refused); trying again for up to 30 s"
    assert back.startswith("Redis at /none is back after ")
    assert (num_errors(metrics, "connection"), num_errors(metrics, "timeout")) == (2, 1)
    assert link.num_recoveries == 1


async def test_an_outage_longer_than_allowed_ends_with_the_field_that_allows_it(link) -> None:
    async def never() -> None:
        raise exceptions.ConnectionError("refused")

    with pytest.raises(RedisGoneError, match=r"Redis at /none has been away for .* \(redis.outage_s = 0.2\): refused"):
        await link.retrying(never)


async def test_answers_that_will_pass_are_waited_out(link) -> None:
    for error in (
        exceptions.BusyLoadingError("loading"),
        exceptions.ReadOnlyError("failover"),
        exceptions.ResponseError("MISCONF disk full"),
        exceptions.ResponseError("Command # 1 (XADD a * b c) of pipeline caused error: ('MISCONF disk full',)"),
        exceptions.ResponseError("UNBLOCKED the stream key no longer exists"),
    ):
        assert await link.retrying(failing(error)) == "answer", error


async def test_any_other_error_answer_is_raised_and_counted_and_one_that_refuses_access_ends(link, metrics) -> None:
    with pytest.raises(exceptions.ResponseError, match="WRONGTYPE"):
        await link.retrying(failing(exceptions.ResponseError("WRONGTYPE not a stream")))
    assert num_errors(metrics, "response") == 1
    for error, message in [
        (exceptions.AuthenticationError("WRONGPASS"), "refuses the credentials"),
        (exceptions.NoPermissionError("no +xadd"), "refuses a command"),
    ]:
        with pytest.raises(RedisGoneError, match=message):
            await link.retrying(failing(error))


async def test_the_memory_limit_is_waited_out_for_longer_than_an_outage_may_last(link, metrics, caplog) -> None:
    caplog.set_level(logging.INFO)
    errors = [exceptions.OutOfMemoryError("command not allowed")] * 300
    assert await link.retrying(failing(*errors)) == "answer"
    full, free = caplog.messages
    assert "memory limit" in full and "takes writes again" in free
    assert num_errors(metrics, "oom") == 300
    with pytest.raises(exceptions.OutOfMemoryError):
        await link.retrying(failing(errors[0]), wait_at_memory_limit=False)


async def test_an_answer_to_an_older_command_does_not_end_an_outage(link, caplog) -> None:
    caplog.set_level(logging.INFO)
    answered = asyncio.Event()
    older = asyncio.create_task(link.retrying(answered.wait))
    await asyncio.sleep(0)

    async def fail_once_and_let_the_older_one_finish() -> None:
        if not answered.is_set():
            answered.set()
            raise exceptions.ConnectionError("refused")

    await link.retrying(fail_once_and_let_the_older_one_finish)
    await older
    assert len([line for line in caplog.messages if "is away" in line]) == 1
    assert len([line for line in caplog.messages if "is back" in line]) == 1


async def test_a_command_that_redis_never_answers_while_it_answers_others_ends_after_an_outages_time(
    link, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.03)
    began = time.monotonic()

    async def answer_others() -> None:
        while True:
            await link.retrying(failing())
            await asyncio.sleep(0.005)

    others = asyncio.create_task(answer_others())
    with pytest.raises(RedisGoneError, match=r"answers, but not to a command in 0 s \(redis.outage_s = 0.2\)"):
        await link.retrying(asyncio.Event().wait)
    others.cancel()
    assert time.monotonic() - began > 0.2
    assert len([line for line in caplog.messages if "answers, but not to" in line]) == 1


async def test_a_command_that_nobody_answers_ends_when_the_outage_has_lasted_too_long(link, monkeypatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.03)
    with pytest.raises(RedisGoneError, match=r"has been away for .* no answer in 0\.\d+ s"):
        await link.retrying(asyncio.Event().wait)


class OutageClock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> OutageClock:
    clock = OutageClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_command_that_was_given_up_gets_twice_the_time_and_others_in_proportion(clock: OutageClock) -> None:
    timeout = AdaptiveTimeout(longest_s=600)
    assert timeout.limit_s(10) == 10
    for _ in range(5):
        timeout.exceeded(10, 10)
    assert timeout.limit_s(10) == 20, "many that are given up at once count as one"
    timeout.exceeded(30, 60)
    assert (timeout.limit_s(10), timeout.limit_s(30)) == (40, 120)
    clock.now += FORGET_S - 1
    timeout.answered(10, 22)
    clock.now += FORGET_S - 1
    timeout.answered(10, 3)
    assert timeout.limit_s(10) == 40, "it is forgotten once none has needed it for a while"
    clock.now += 2
    assert timeout.limit_s(10) == 10
    short = AdaptiveTimeout(longest_s=15)
    short.exceeded(10, 10)
    assert (short.limit_s(10), short.limit_s(25)) == (15, 25), "none gets more than the longest, unless it usually does"


async def test_a_cancelled_command_never_goes_on(streams) -> None:
    over = asyncio.Event()

    async def repeat() -> None:
        while not over.is_set():
            await asyncio.sleep(0)
            await streams.connection.retrying(streams.connection.commands.ping)

    repeating = []
    for num_steps in range(80):
        task = asyncio.create_task(repeat())
        for _ in range(num_steps % 40):
            await asyncio.sleep(0)
        task.cancel()
        repeating.append(task)
    _, going_on = await asyncio.wait(repeating, timeout=60)
    over.set()
    assert not going_on
