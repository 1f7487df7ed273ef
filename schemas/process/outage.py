"""Outages of Redis: which errors are temporary, how long an outage may last, and one log line when it begins, one each
minute, and one when it ends.

The producer retries its commands in an event loop and the trainer in threads; both share these rules. redis-py's own
`Retry` bounds the number of attempts, but an outage is bounded in time and by a signal, so only redis-py's backoff is
used.
"""

import logging
import re
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
_REMEDIES = {
    "MISCONF": "make room on its disk",
    "READONLY": "point redis.url at the primary, or make this server one (REPLICAOF NO ONE)",
    "NOREPLICAS": "start its replicas, or lower its min-replicas-to-write",
}
"""Answers of a server that reads but does not write, and what helps."""
_SURE_S = 5.0
"""A server that has refused no write for so long writes again. Longer than the pause between two attempts."""
_REPEAT_S = 60.0
_IN_PIPELINE = re.compile(r"Command # .* of pipeline caused error: (?:\((['\"])(.*)\1,\)|(.*))", re.DOTALL)
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
        self._refused_at = self._told_at = 0.0

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

    def failed(self, error: BaseException, reason: str = "") -> bool:
        """Notes that a command found Redis unreachable, or was refused. reason: for the log, in place of the error's
        own text. Returns True if a write was refused.

        Raises:
            RedisGoneError: the outage has lasted for `outage_s`.
        """
        now, reason, remedy = time.monotonic(), reason or said_by(error), what_helps(error)
        what = f"refuses to write ({reason}): {remedy}" if remedy else f"is away ({reason})"
        with self._noting:
            if remedy:
                self._refused_at = now
            if self.since is None:
                self.since = self._told_at = now
                self.num_begun += 1
                log.warning("%s %s; trying again for up to %.0f s", self.where, what, self.outage_s)
            elif (lasted_s := now - self.since) > self.outage_s:
                raise RedisGoneError(
                    f"{self.where} has {'refused to write' if remedy else 'been away'} for {lasted_s:.0f} s "
                    f"(redis.outage_s = {self.outage_s:g}): {'; '.join(filter(None, (reason, remedy)))}"
                ) from error
            elif now - self._told_at > _REPEAT_S:
                self._told_at = now
                log.warning("%s still %s, after %.0f s of at most %.0f", self.where, what, lasted_s, self.outage_s)
        return bool(remedy)

    def answered(self, started: float, *, was_refused: bool = False) -> None:
        """Notes a reply to a command sent at `started`; a command sent before the outage does not end it, and while
        writes are refused, no read does. was_refused: `failed` returned True for the same command."""
        with self._noting:
            if self.since is None or started < self.since:
                return
            if was_refused or started - self._refused_at > _SURE_S:
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


def what_helps(error: BaseException) -> str:
    """Returns what helps a server that answers but refuses to write; empty for any other error."""
    if not isinstance(error, exceptions.ResponseError):
        return ""
    if isinstance(error, exceptions.ReadOnlyError):  # redis-py leaves out the code
        return _REMEDIES["READONLY"]
    return next((remedy for code, remedy in _REMEDIES.items() if has_code(error, code)), "")


def said_by(error: BaseException) -> str:
    """Returns the text of an error in one line, without the command of a pipeline that redis-py puts before it."""
    text = str(error)
    if (match := _IN_PIPELINE.fullmatch(text)) is not None:
        text = match[2] or match[3]
    return " ".join(text.split()) or type(error).__name__


def takes_no_more(error: BaseException) -> bool:
    """Returns whether a stream refuses an entry because the largest ids are taken; the trainer makes it anew."""
    return any(text in str(error) for text in ("exhausted the last possible ID", "smaller than the target stream top"))


def has_code(error: exceptions.ResponseError, *codes: str) -> bool:
    """Returns whether the reply begins with one of `codes`; in a pipeline, redis-py puts the command before it."""
    text = str(error)
    return any(text.startswith(f"{code} ") or f"{code} " in text.partition("caused error: ")[2] for code in codes)
