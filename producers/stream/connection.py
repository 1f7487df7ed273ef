"""The producer's one Redis: a pool for commands, a pool for blocking reads, and one way to live through an outage."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.adaptive_timeout import AdaptiveTimeout
from penstock.schemas.config import ConfigError
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.process.redis_url import certificate_problem, place_of
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_MS = 2000
"""The longest that one blocking read waits in the server."""
ANSWER_S = BLOCK_MS / 1000 + 8.0
"""A command unanswered for so long has failed. Above BLOCK with a margin: a read that merely waits is not given up."""
SLOWEST_BYTES_PER_S = 65536
"""What is sent gets this much longer by its size: the entry cap of 4 MiB makes it a minute."""
CONNECT_TIMEOUT_S = 5.0
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0

# Answers of a server that will serve again: loading, a replica in the middle of a failover, a full disk, a script that
# takes long, a blocking read whose stream was deleted, and a transaction of which nothing was executed for one of these
# reasons. Anything else that is an answer is a bug or a missing permission.
_PASSING = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.ExecAbortError,
)
_REFUSALS = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_PASSING_CODES = ("MISCONF", "NOREPLICAS", "UNBLOCKED", "BUSY")


class ProducerConnection:
    """Two clients of one server, and the state of the link to it.

    num_recoveries: how often Redis came back after it was away. Whoever keeps state in Redis compares it with what it
        last saw, and looks again.
    """

    def __init__(
        self, commands: Redis, blocking: Redis, *, outage_s: float, metrics: ProducerMetrics, url: str = ""
    ) -> None:
        self.commands = commands
        self.blocking = blocking
        """For reads with BLOCK; each occupies a connection of its own while it waits."""
        self.num_recoveries = 0
        self._outage_s = outage_s
        self._metrics = metrics
        self._url = url
        self._where = f"Redis at {place_of(url)}" if url else "Redis"
        self._away_since: float | None = None
        self._last_answer = 0.0
        self._patience = AdaptiveTimeout(outage_s)
        self._is_known_slow = False
        self._full_since: float | None = None

    @classmethod
    def open(cls, url: str, *, outage_s: float, metrics: ProducerMetrics) -> "ProducerConnection":
        """Connects at the first command. User, password and TLS come with the URL (`rediss://user:password@host`); one
        from outside has gone through `penstock.schemas.process.redis_url`, which refuses options that would undo what is set here.

        Raises:
            ConfigError: not a Redis URL.
        """
        try:
            return cls(_client(url), _client(url), outage_s=outage_s, metrics=metrics, url=url)
        except ValueError:  # its message may quote a part of the password
            raise ConfigError(
                "REDIS_URL or redis.url is no Redis URL; expected redis://[user:password@]host[:port][/database], "
                "rediss://... for TLS, or unix:///path"
            ) from None

    async def retrying(
        self, command: Callable[[], Awaitable[T]], *, wait_at_memory_limit: bool = True, num_bytes: int = 0
    ) -> T:
        """Awaits `command()` again and again, with jittered pauses, until the server has answered it. A command that
        may come to send nothing does not belong here: its success would be taken for an answer.

        Waits for Redis to be reachable (at most `outage_s`) or, at its memory limit, for the trainer to free some. A
        command whose reply was lost may have been executed: what goes through here is harmless when it happens twice.
        One that is given up gets more time when it is repeated: see `AdaptiveTimeout`.

        Args:
            num_bytes: what the command sends, where that is much.

        Raises:
            RedisGoneError: Redis was away for `outage_s`, or refuses the credentials or the command.
            redis.exceptions.OutOfMemoryError: at the memory limit, with `wait_at_memory_limit=False`.
            redis.exceptions.ResponseError: any other error answer.
        """
        delay_s = FIRST_DELAY_S
        usual_s = ANSWER_S + num_bytes / SLOWEST_BYTES_PER_S
        refused = False
        while True:
            started, answer_s = time.monotonic(), self._limit_s(usual_s)
            try:
                async with asyncio.timeout(answer_s) as limit:
                    result = await _awaited(command)
            except exceptions.OutOfMemoryError as error:
                self._metrics.stream_errors.labels("oom").inc()
                if not wait_at_memory_limit:
                    raise
                refused = True
                self._note_full(error)
            except exceptions.NoPermissionError as error:
                raise RedisGoneError(f"{self._where} refuses a command: {error}") from error
            except (exceptions.RedisError, OSError) as error:
                self._unless_refused(error)
                if not _is_passing(error):
                    self._metrics.stream_errors.labels("response").inc()
                    raise
                if limit.expired() and time.monotonic() - self._last_answer < answer_s / 2:
                    self._note_slow(error, answer_s, num_bytes)
                else:
                    self._note_away(error, answer_s)
                if limit.expired():
                    self._patience.exceeded(usual_s, answer_s)
                if isinstance(error, exceptions.ResponseError):
                    # The address may lead to another server by now, and this connection to one that was demoted.
                    await self.commands.connection_pool.disconnect(inuse_connections=False)
                    await self.blocking.connection_pool.disconnect(inuse_connections=False)
            else:
                self._note_here(started)
                self._patience.answered(usual_s, time.monotonic() - started)
                if refused and self._full_since is not None:
                    log.info("%s takes writes again after %.1f s", self._where, time.monotonic() - self._full_since)
                    self._full_since = None
                return result
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * 2, LONGEST_DELAY_S)

    async def close(self) -> None:
        await self.blocking.aclose()
        await self.commands.aclose()

    def _unless_refused(self, error: Exception) -> None:
        """Raises for what no time will cure. While connecting, redis-py wraps it in a ConnectionError."""
        reasons = (error, error.__cause__, error.__context__)
        if any(isinstance(reason, _REFUSALS) for reason in reasons):
            raise RedisGoneError(f"{self._where} refuses the credentials: {error}") from error
        problem = certificate_problem(error, self._url)
        if problem is not None:
            raise RedisGoneError(problem) from error

    def _limit_s(self, usual_s: float) -> float:
        limit_s = self._patience.limit_s(usual_s)
        if limit_s == usual_s:
            self._is_known_slow = False
        if self._away_since is None:
            return limit_s
        return max(usual_s, min(limit_s, self._away_since + self._outage_s - time.monotonic()))

    def _note_full(self, error: Exception) -> None:
        if self._full_since is None:
            self._full_since = time.monotonic()
            log.warning("%s is at its memory limit (%s): pausing until the trainer frees some", self._where, error)

    def _note_slow(self, error: Exception, answer_s: float, num_bytes: int) -> None:
        """Redis answers, but not this command: what is sent, or what it takes there, is too much for the time given."""
        self._metrics.stream_errors.labels("timeout").inc()
        what = f"{num_bytes:,} bytes" if num_bytes else "a command"
        if answer_s >= self._outage_s:
            raise RedisGoneError(
                f"{self._where} answers, but not to {what} in {answer_s:.0f} s (redis.outage_s = {self._outage_s:g})"
            ) from error
        if not self._is_known_slow:
            self._is_known_slow = True
            log.warning(
                "%s answers, but not to %s in %.1f s (a slow link or disk?): trying again with more and more time",
                self._where,
                what,
                answer_s,
            )

    def _note_away(self, error: Exception, answer_s: float) -> None:
        timed_out = isinstance(error, (exceptions.TimeoutError, TimeoutError))
        self._metrics.stream_errors.labels("timeout" if timed_out else "connection").inc()
        reason = str(error) or f"no answer in {answer_s:g} s"
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            log.warning("%s is away (%s); trying again for up to %.0f s", self._where, reason, self._outage_s)
        elif now - self._away_since > self._outage_s:
            raise RedisGoneError(
                f"{self._where} has been away for {now - self._away_since:.0f} s "
                f"(redis.outage_s = {self._outage_s:g}): {reason}"
            ) from error

    def _note_here(self, started: float) -> None:
        self._last_answer = time.monotonic()
        # An answer to what was asked before the outage says nothing about its end.
        if self._away_since is not None and started >= self._away_since:
            log.info("%s is back after %.1f s", self._where, time.monotonic() - self._away_since)
            self._away_since = None
            self.num_recoveries += 1


async def _awaited(command: Callable[[], Awaitable[T]]) -> T:
    try:
        return await command()
    except exceptions.ExecAbortError as error:
        if "OOM " in str(error):  # the limit was reached between the transaction's commands and its EXEC
            raise exceptions.OutOfMemoryError(str(error)) from error
        raise


class _Abrupt:
    """What a connection that failed has not sent yet is dropped. redis-py would go on sending it behind the next try's
    back, which a slow link has no room for."""

    _writer: asyncio.StreamWriter | None

    async def disconnect(self, nowait: bool = False, **reasons: Any) -> None:
        if nowait and self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(nowait, **reasons)  # type: ignore[misc]


def _client(url: str) -> Redis:
    # redis-py's own retries would repeat commands behind our back, inside a MULTI too; RESP3 changes reply shapes. Its
    # socket_timeout puts every send under asyncio.wait_for, which on Python 3.11 can swallow a cancellation, and a task
    # told to stop goes on. `retrying` has a timeout of its own in its place.
    client = Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=None,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
    )
    pool = client.connection_pool
    pool.connection_class = type("AbruptConnection", (_Abrupt, pool.connection_class), {})
    return client


def _is_passing(error: Exception) -> bool:
    if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError, *_PASSING)):
        return True
    return isinstance(error, exceptions.ResponseError) and says(error, *_PASSING_CODES)


def says(error: exceptions.ResponseError, *codes: str) -> bool:
    """Whether the server's answer begins with one of `codes`; in a pipeline, redis-py puts the command before it."""
    text = str(error)
    return any(text.startswith(f"{code} ") or f"{code} " in text.partition("caused error: ")[2] for code in codes)
