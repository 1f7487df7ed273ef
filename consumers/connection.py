"""The trainer's one Redis client, and the one place that retries."""

import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

log = logging.getLogger(__name__)

T = TypeVar("T")

BLOCK_S = 1.0
"""How long a blocking read waits in the server."""
SOCKET_TIMEOUT_S = BLOCK_S + 9.0
"""Above the block with a margin: redis-py would otherwise drop or repeat a read that is merely waiting."""


class RedisGoneError(RuntimeError):
    """Redis stayed away for longer than the run file allows."""


class Connection:
    """A client whose commands are repeated, with jitter, while Redis is away.

    A repeated command may have been executed before its reply was lost: everything sent through `call` is idempotent
    or harmless when it happens twice.
    """

    def __init__(self, url: str, outage_s: float, *, on_error: Callable[[str], None] = lambda kind: None) -> None:
        self._outage_s = outage_s
        self._on_error = on_error
        # redis-py's own retries would repeat commands behind our back, even inside a MULTI.
        self.client = redis.Redis.from_url(
            url,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=SOCKET_TIMEOUT_S,
            socket_connect_timeout=5.0,
        )
        self._server_run_id: str | None = None
        self._maybe_restarted = True

    def call(self, command: Callable[[Any], T]) -> T:
        """Runs `command(client)`, again and again while Redis cannot be reached.

        Raises:
            RedisGoneError: for longer than `outage_s`.
        """
        away_since: float | None = None
        delay_s = 0.05
        while True:
            try:
                result = command(self.client)
            except (redis.ConnectionError, redis.TimeoutError) as error:
                # redis-py wraps a refused password where it connects anew: no time will make it fit.
                if isinstance(error, redis.AuthenticationError) or isinstance(
                    error.__cause__, redis.AuthenticationError
                ):
                    raise RedisGoneError("Redis refuses the user name or password of its URL") from error
                now = time.monotonic()
                self._on_error(type(error).__name__)
                self._maybe_restarted = True
                if away_since is None:
                    away_since = now
                    log.warning("redis is away (%s); trying again for up to %.0f s", error, self._outage_s)
                elif now - away_since > self._outage_s:
                    away = f"Redis has been away for {now - away_since:.0f} s (redis.outage_s = {self._outage_s:g})"
                    raise RedisGoneError(f"{away}: {error}") from error
                time.sleep(delay_s * random.uniform(0.5, 1.5))
                delay_s = min(delay_s * 2, 2.0)
                continue
            if away_since is not None:
                log.info("redis is back after %.1f s", time.monotonic() - away_since)
            return result

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
