"""Outages of Redis: which errors are temporary, how long an outage may last, and one log line when it begins and one
when it ends.

The producer retries its commands in an event loop and the trainer in threads; both share these rules. redis-py's own
`Retry` bounds the number of attempts, but an outage is bounded in time and by a signal, so only redis-py's backoff is
used.
"""

import logging
import threading
import time
from typing import Any, TypeVar

from redis import exceptions
from redis.backoff import EqualJitterBackoff

from penstock.schemas.config import ConfigError
from penstock.schemas.process.redis_url import certificate_problem, place_of

log = logging.getLogger(__name__)

Client = TypeVar("Client")

CONNECT_TIMEOUT_S = 5.0
BACKOFF = EqualJitterBackoff(cap=2.0, base=0.05)
"""The pauses between attempts."""

# Answers of a server that will serve again: loading, a replica in the middle of a failover, a full disk, a script that
# takes long, a blocking read whose stream was deleted, and a transaction of which nothing was executed for one of these
# reasons. Any other error answer is a bug or a missing permission.
_PASSING = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
    exceptions.ExecAbortError,
)
_PASSING_CODES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "UNBLOCKED", "BUSY")
_REFUSALS = (exceptions.AuthenticationError, exceptions.AuthorizationError)


class RedisGoneError(RuntimeError):
    """Redis was unreachable for longer than the run file allows, or refuses this process."""


class OutageTracker:
    """Tracks one server's outages across all commands and threads.

    num_begun, num_ended: outages since the start. Code that keeps state in Redis checks it again when one of them has
        changed.
    """

    def __init__(self, url: str, outage_s: float) -> None:
        self.where = f"Redis at {place_of(url)}" if url else "Redis"
        self.outage_s = outage_s
        self.since: float | None = None
        """When the outage began, in monotonic seconds; None without one."""
        self.num_begun = 0
        self.num_ended = 0
        self._url = url
        self._noting = threading.Lock()

    def check_refused(self, error: BaseException) -> None:
        """Raises for an error that waiting cannot fix. While connecting, redis-py wraps a refusal in a ConnectionError.

        Raises:
            RedisGoneError: Redis refuses the credentials or the command, keeps the run on another node of a cluster, or
                shows a certificate that does not verify.
        """
        if isinstance(error, exceptions.NoPermissionError):
            raise RedisGoneError(f"{self.where} refuses a command: {error}") from error
        if any(isinstance(reason, _REFUSALS) for reason in (error, error.__cause__, error.__context__)):
            raise RedisGoneError(f"{self.where} refuses the credentials: {error}") from error
        problem = on_another_node(error, self.where) or certificate_problem(error, self._url)
        if problem is not None:
            raise RedisGoneError(problem) from error

    def failed(self, error: BaseException, reason: str = "") -> None:
        """Notes that a command found Redis unreachable. reason: for the log, in place of the error's own text.

        Raises:
            RedisGoneError: the outage has lasted for `outage_s`.
        """
        now, reason = time.monotonic(), reason or str(error)
        with self._noting:
            if self.since is None:
                self.since = now
                self.num_begun += 1
                log.warning("%s is away (%s); trying again for up to %.0f s", self.where, reason, self.outage_s)
            elif now - self.since > self.outage_s:
                raise RedisGoneError(
                    f"{self.where} has been away for {now - self.since:.0f} s "
                    f"(redis.outage_s = {self.outage_s:g}): {reason}"
                ) from error

    def answered(self, started: float) -> None:
        """Notes a reply to a command sent at `started`; a command sent before the outage does not end it."""
        with self._noting:
            if self.since is not None and started >= self.since:
                log.info("%s is back after %.1f s", self.where, time.monotonic() - self.since)
                self.since = None
                self.num_ended += 1


def on_another_node(error: BaseException, where: str) -> str | None:
    """Says what to do if the server is a node of a cluster that does not hold the run's keys; None for other errors."""
    if not isinstance(error, exceptions.AskError):  # MOVED is one
        return None
    host, port = error.node_addr
    return (
        f"{where} is a node of a Redis cluster, and the run's keys are on node {host}:{port} (slot {error.slot_id}); "
        "set REDIS_URL or redis.url to that node, or to a server that is no cluster: all keys of a run are in one slot"
    )


def open_client(kind: type[Client], url: str, **settings: Any) -> Client:
    """Returns a redis-py client, synchronous or asyncio, that connects at its first command. User, password and TLS are
    in the URL (`rediss://user:password@host`); `penstock.schemas.process.redis_url` has checked a user's URL, and
    refuses options that would override `settings`.

    Raises:
        ConfigError: not a Redis URL.
    """
    factory: Any = kind
    try:
        # RESP3 would change the shapes of replies.
        client: Client = factory.from_url(url, protocol=2, socket_connect_timeout=CONNECT_TIMEOUT_S, **settings)
        return client
    except ValueError:  # its message may quote a part of the password
        raise ConfigError(
            "REDIS_URL or redis.url is no Redis URL; expected redis://[user:password@]host[:port][/database], "
            "rediss://... for TLS, or unix:///path"
        ) from None


def pause_s(num_failures: int) -> float:
    """Returns the pause after `num_failures` failures of one command, with jitter."""
    return BACKOFF.compute(min(num_failures, 16) - 1)  # redis-py's 2 ** n overflows a float in the end


def is_passing(error: BaseException) -> bool:
    """Returns whether the server is expected to accept the same command later."""
    if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError, *_PASSING)):
        return True
    return isinstance(error, exceptions.ResponseError) and has_code(error, *_PASSING_CODES)


def takes_no_more(error: BaseException) -> bool:
    """Returns whether a stream refuses an entry because the largest ids are taken; the trainer makes it anew."""
    return any(text in str(error) for text in ("exhausted the last possible ID", "smaller than the target stream top"))


def has_code(error: exceptions.ResponseError, *codes: str) -> bool:
    """Returns whether the reply begins with one of `codes`; in a pipeline, redis-py puts the command before it."""
    text = str(error)
    return any(text.startswith(f"{code} ") or f"{code} " in text.partition("caused error: ")[2] for code in codes)
