"""The trainer's one Redis client, and the one place that retries."""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis
from penstock.schemas.config import ConfigError
from penstock.schemas.process.outage import RedisGoneError
from penstock.schemas.process.redis_url import certificate_problem
from redis.backoff import NoBackoff
from redis.retry import Retry

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_S = 1.0
"""How long a blocking read waits in the server."""
SOCKET_TIMEOUT_S = BLOCK_S + 9.0
"""Above the block with a margin: redis-py would otherwise drop or repeat a read that is merely waiting."""
SHUTDOWN_TIMEOUT_S = 3.0
"""A trainer that is told to stop while Redis is away gives it so long to come back."""

# Answers of a server that will serve again: a replica in the middle of a failover, a full disk under its log.
_PASSING = (redis.ReadOnlyError, redis.exceptions.ClusterDownError, redis.exceptions.TryAgainError)
_PASSING_CODES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "UNBLOCKED", "BUSY")


class TrainerConnection:
    """A client whose commands are repeated, with jitter, while Redis is away.

    A repeated command may have been executed before its reply was lost: everything sent through `call` is idempotent
    or harmless when it happens twice.

    Raises:
        ConfigError: not a Redis URL.
    """

    def __init__(self, url: str, outage_s: float, *, on_error: Callable[[str], None] = lambda kind: None) -> None:
        self.num_outages = 0
        self._url = url
        self._outage_s = outage_s
        self._on_error = on_error
        self._stopped_at: float | None = None
        self._random = random.Random()
        self._server_run_id: str | None = None
        self._maybe_restarted = True
        try:
            # redis-py's own retries would repeat commands behind our back, even inside a MULTI.
            self.client = redis.Redis.from_url(
                url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=SOCKET_TIMEOUT_S,
                socket_connect_timeout=5.0,
                redis_connect_func=self._on_connect,
            )
        except ValueError:  # its message may quote a part of the password
            raise ConfigError(
                "REDIS_URL or redis.url is no Redis URL; expected redis://[user:password@]host[:port][/database], "
                "rediss://... for TLS, or unix:///path"
            ) from None

    def stop(self) -> None:
        """From now on an outage is waited out for `SHUTDOWN_TIMEOUT_S` only. May be called by a signal handler."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    @property
    def stopping(self) -> bool:
        return self._stopped_at is not None

    def call(self, command: Callable[[Any], T]) -> T:
        """Runs `command(client)`, again and again while Redis cannot be reached. Its return or `stop` unblocks it.

        Raises:
            RedisGoneError: for longer than `outage_s`; or it refuses the credentials or cannot prove who it is.
            redis.ResponseError: an error answer that will not pass.
        """
        away_since: float | None = None
        delay_s = 0.05
        while True:
            began = time.monotonic()
            try:
                result = command(self.client)
            except (redis.RedisError, OSError) as error:
                self._check_passing(error)
                self._on_error(type(error).__name__)
                self._maybe_restarted = True
                if away_since is None:
                    away_since = began
                    self.num_outages += 1
                    log.warning("redis is away (%s); trying again for up to %.0f s", error, self._outage_s)
                self._check_patience(away_since, error)
                self.pause(delay_s * self._random.uniform(0.5, 1.5))
                delay_s = min(delay_s * 2, 2.0)
                continue
            if away_since is not None:
                log.info("redis is back after %.1f s", time.monotonic() - away_since)
            return result

    def pause(self, seconds: float) -> None:
        """Sleeps; `stop` cuts it short, to a tenth of a second at most."""
        wake_at = time.monotonic() + seconds
        while (left := wake_at - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            if self.stopping:
                return

    def restarted(self) -> bool:
        """True once after the server behind the connection became another process: what it lost must be reconciled."""
        if not self._maybe_restarted:
            return False
        self._maybe_restarted = False
        run_id = self.call(lambda client: client.info("server"))["run_id"]
        changed = self._server_run_id is not None and run_id != self._server_run_id
        self._server_run_id = run_id
        return changed

    def close(self) -> None:
        self.client.close()

    def _on_connect(self, connection: Any) -> None:
        # redis-py replaces a connection that broke while idle without an error: a restart would go unnoticed.
        self._maybe_restarted = True
        connection.on_connect()

    def _check_passing(self, error: Exception) -> None:
        """Raises for an error that no time will cure."""
        # redis-py wraps a refused password where it connects anew.
        if isinstance(error, redis.AuthenticationError) or isinstance(error.__cause__, redis.AuthenticationError):
            raise RedisGoneError("Redis refuses the user name or password of its URL") from error
        problem = certificate_problem(error, self._url)
        if problem is not None:
            raise RedisGoneError(problem) from error
        if isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError)):
            return
        if isinstance(error, _PASSING) or str(error).startswith(_PASSING_CODES):
            # The name may lead to another server by now, and this connection to the one that was demoted.
            self.client.connection_pool.disconnect(inuse_connections=False)
            return
        raise error

    def _check_patience(self, away_since: float, error: Exception) -> None:
        now = time.monotonic()
        away_s = now - away_since
        if self._stopped_at is not None and now - max(self._stopped_at, away_since) >= SHUTDOWN_TIMEOUT_S:
            raise RedisGoneError(
                f"stopped while Redis is away ({error}): what was trained since the last checkpoint is not committed"
            ) from error
        if away_s > self._outage_s:
            raise RedisGoneError(
                f"Redis has been away for {away_s:.0f} s (redis.outage_s = {self._outage_s:g}): {error}"
            ) from error
