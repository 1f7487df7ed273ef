"""The producer's connections to Redis: a pool for commands, a pool for blocking reads, a client for threads, and the
one place that repeats commands."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.retry import Retry as SyncRetry

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.schemas.process.outage import (
    OutageTracker,
    RedisGoneError,
    is_passing,
    open_client,
    pause_s,
    takes_no_more,
)
from penstock.schemas.process.redis_url import server_of

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_MS = 2000
"""The longest that one blocking read waits in the server."""
ANSWER_S = BLOCK_MS / 1000 + 8.0
"""A command without an answer for this long has failed. Well above BLOCK_MS: a read that merely waits does not fail."""
SLOWEST_BYTES_PER_S = 65536
"""Extends the timeout by the size of what is sent: by a minute for the entry cap of 4 MiB."""
FORGET_S = 60.0
"""A raised timeout falls back after this long without a late answer."""


class AdaptiveTimeout:
    """The time that a command may take, adapted to answers that came too late.

    After a command has timed out, every command gets twice the time in proportion, until for `FORGET_S` none has needed
    more than usual. Otherwise a slow disk or link would be sent the same command for ever.

    longest_s: no command gets more, unless its usual time is more.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._factor = 1.0
        self._slow_at = 0.0

    def limit_s(self, usual_s: float) -> float:
        if time.monotonic() - self._slow_at > FORGET_S:
            self._factor = 1.0
        return max(usual_s, min(usual_s * self._factor, self._longest_s))

    def exceeded(self, usual_s: float, limit_s: float) -> None:
        self._factor = max(self._factor, 2 * limit_s / usual_s)
        self._slow_at = time.monotonic()

    def answered(self, usual_s: float, took_s: float) -> None:
        if took_s > usual_s:
            self._slow_at = time.monotonic()


class ProducerConnection:
    """The clients of one Redis server, and the state of the link to it.

    place: the server's address and database; see `penstock.schemas.process.redis_url.server_of`.
    """

    def __init__(
        self,
        commands: Redis,
        blocking: Redis,
        threads: "redis.Redis",
        *,
        outage_s: float,
        metrics: ProducerMetrics,
        url: str = "",
    ) -> None:
        self.place = server_of(url)
        self.commands = commands
        self.blocking = blocking
        """For reads with BLOCK, each of which occupies a connection while it waits."""
        self._threads = threads
        self._metrics = metrics
        self._outage = OutageTracker(url, outage_s)
        self._timeout = AdaptiveTimeout(outage_s)
        self._last_answer = 0.0
        self._is_known_slow = False
        self._full_since: float | None = None

    @classmethod
    def open(cls, url: str, *, outage_s: float, metrics: ProducerMetrics) -> "ProducerConnection":
        """Connects at the first command; see `open_client`."""
        threads = open_client(redis.Redis, url, retry=SyncRetry(NoBackoff(), 0), socket_timeout=ANSWER_S)
        return cls(_client(url), _client(url), threads, outage_s=outage_s, metrics=metrics, url=url)

    @property
    def is_full(self) -> bool:
        """True while the server is at its memory limit and a command waits for the trainer to free some."""
        return self._full_since is not None

    @property
    def num_recoveries(self) -> int:
        """The outages that have ended; see `OutageTracker.num_ended`."""
        return self._outage.num_ended

    async def retrying(
        self, command: Callable[[], Awaitable[T]], *, wait_at_memory_limit: bool = True, num_bytes: int = 0
    ) -> T:
        """Repeats `command()`, with jittered pauses, until the server has answered it. The command must send something:
        its success is taken for an answer.

        Waits for Redis to be reachable (at most `outage_s`) or, at its memory limit, for the trainer to free some, and
        for the trainer to make a stream anew whose entry ids are used up. A
        command whose reply was lost may have been executed, so it must be harmless when executed twice. One that times
        out gets more time when it is repeated: see `AdaptiveTimeout`.

        Args:
            num_bytes: the size of what the command sends, if that is large.

        Raises:
            RedisGoneError: Redis was away for `outage_s`, or refuses the credentials or the command.
            redis.exceptions.OutOfMemoryError: at the memory limit, with `wait_at_memory_limit=False`.
            redis.exceptions.ResponseError: any other error answer.
        """
        num_failures = num_refused = 0
        was_refused = False
        usual_s = ANSWER_S + num_bytes / SLOWEST_BYTES_PER_S
        while True:
            started, limit_s = time.monotonic(), self._limit_s(usual_s)
            try:
                async with asyncio.timeout(limit_s) as limit:
                    result = await _awaited(command)
            except exceptions.OutOfMemoryError as error:
                self._metrics.stream_errors.labels("oom").inc()
                if not wait_at_memory_limit:
                    raise
                num_refused += 1
                self._note_full(error)
            except (exceptions.RedisError, OSError) as error:
                self._outage.check_refused(error)
                if takes_no_more(error):
                    self._note_no_more(error, is_first=not num_failures)
                elif not is_passing(error):
                    self._metrics.stream_errors.labels("response").inc()
                    raise
                elif limit.expired() and time.monotonic() - self._last_answer < limit_s / 2:
                    self._note_slow(error, limit_s, num_bytes)
                else:
                    was_refused |= self._note_away(error, limit_s)
                if limit.expired():
                    self._timeout.exceeded(usual_s, limit_s)
                if isinstance(error, exceptions.ResponseError):
                    # The address may lead to another server by now, and this connection to a demoted one.
                    await self.commands.connection_pool.disconnect(inuse_connections=False)
                    await self.blocking.connection_pool.disconnect(inuse_connections=False)
            else:
                self._last_answer = time.monotonic()
                self._outage.answered(started, was_refused=was_refused)
                self._timeout.answered(usual_s, time.monotonic() - started)
                if num_refused:
                    self._note_free()
                return result
            num_failures += 1
            await asyncio.sleep(pause_s(num_failures))

    def call(self, command: Callable[[Any], T]) -> T:
        """Returns `command(client)`, called once with a synchronous client; threads repeat their work as a whole.

        Raises:
            redis.RedisError: Redis is away, or refuses the command.
        """
        return command(self._threads)

    async def close(self) -> None:
        self._threads.close()
        await self.blocking.aclose()
        await self.commands.aclose()

    def _limit_s(self, usual_s: float) -> float:
        limit_s = self._timeout.limit_s(usual_s)
        if limit_s == usual_s:
            self._is_known_slow = False
        if self._outage.since is None:
            return limit_s
        return max(usual_s, min(limit_s, self._outage.since + self._outage.outage_s - time.monotonic()))

    def _note_full(self, error: Exception) -> None:
        if self._full_since is None:
            self._full_since = time.monotonic()
            log.warning(
                "%s is at its memory limit (%s): pausing until the trainer frees some", self._outage.where, error
            )

    def _note_no_more(self, error: Exception, *, is_first: bool) -> None:
        self._metrics.stream_errors.labels("response").inc()
        if is_first:
            log.warning("%s: %s; waiting for the trainer to make the stream anew", self._outage.where, error)

    def _note_free(self) -> None:
        if self._full_since is not None:
            log.info("%s takes writes again after %.1f s", self._outage.where, time.monotonic() - self._full_since)
            self._full_since = None

    def _note_slow(self, error: Exception, limit_s: float, num_bytes: int) -> None:
        """Notes that Redis answers, but not this command in the time given."""
        self._metrics.stream_errors.labels("timeout").inc()
        what = f"{num_bytes:,} bytes" if num_bytes else "a command"
        where, outage_s = self._outage.where, self._outage.outage_s
        if limit_s >= outage_s:
            raise RedisGoneError(
                f"{where} answers, but not to {what} in {limit_s:.0f} s (redis.outage_s = {outage_s:g})"
            ) from error
        if not self._is_known_slow:
            self._is_known_slow = True
            log.warning(
                "%s answers, but not to %s in %.1f s (a slow link or disk?): trying again with more and more time",
                where,
                what,
                limit_s,
            )

    def _note_away(self, error: Exception, limit_s: float) -> bool:
        timed_out = isinstance(error, (exceptions.TimeoutError, TimeoutError))
        self._metrics.stream_errors.labels("timeout" if timed_out else "connection").inc()
        return self._outage.failed(error, "" if str(error) else f"no answer in {limit_s:g} s")


async def _awaited(command: Callable[[], Awaitable[T]]) -> T:
    try:
        return await command()
    except exceptions.ExecAbortError as error:
        if "OOM " in str(error):  # the limit was reached between the transaction's commands and its EXEC
            raise exceptions.OutOfMemoryError(str(error)) from error
        raise


class _Abrupt:
    """Drops what a failed connection has not sent yet. redis-py would keep sending it alongside the next attempt, for
    which a slow link has no room."""

    _writer: asyncio.StreamWriter | None

    async def disconnect(self, nowait: bool = False, **reasons: Any) -> None:
        if nowait and self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(nowait, **reasons)  # type: ignore[misc]


def _client(url: str) -> Redis:
    # redis-py's own retries would repeat commands unseen, inside a MULTI too. Its socket_timeout wraps every send in
    # asyncio.wait_for, which on Python 3.11 can swallow a cancellation, so that a cancelled task continues; `retrying`
    # has a timeout of its own instead.
    client = open_client(Redis, url, decode_responses=False, retry=Retry(NoBackoff(), 0), socket_timeout=None)
    pool = client.connection_pool
    pool.connection_class = type("AbruptConnection", (_Abrupt, pool.connection_class), {})
    return client
