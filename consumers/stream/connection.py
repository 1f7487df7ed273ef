"""The trainer's connection to Redis, the only place that retries commands."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.schemas.process.outage import OutageTracker, RedisGoneError, is_passing, open_client, pause_s

T = TypeVar("T")

BLOCK_S = 1.0
"""How long the server blocks a read."""
SOCKET_TIMEOUT_S = BLOCK_S + 9.0
"""Longer than the block, by a margin: otherwise redis-py would drop or repeat a read that is merely waiting."""
SHUTDOWN_TIMEOUT_S = 3.0
"""How long a trainer that was told to stop waits for an unreachable Redis."""


class TrainerConnection:
    """A client that retries commands, with jitter, while Redis is unreachable.

    A retried command may have been executed before its reply was lost: every command sent through `call` is idempotent
    or harmless when executed twice. Any thread may call.

    Raises:
        ConfigError: not a Redis URL.
    """

    def __init__(self, url: str, outage_s: float, *, on_error: Callable[[str], None] = lambda kind: None) -> None:
        self._outage = OutageTracker(url, outage_s)
        self._on_error = on_error
        self._stopped_at: float | None = None
        self._server_run_id: str | None = None
        self._maybe_restarted = True
        # redis-py's own retries would silently repeat commands, also inside a MULTI.
        self.client = open_client(
            redis.Redis,
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=SOCKET_TIMEOUT_S,
            redis_connect_func=self._on_connect,
        )

    @property
    def num_outages(self) -> int:
        return self._outage.num_begun

    def stop(self) -> None:
        """Limits the wait for an outage to `SHUTDOWN_TIMEOUT_S` from now on. A signal handler may call it."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    @property
    def stopping(self) -> bool:
        return self._stopped_at is not None

    def call(self, command: Callable[[Any], T]) -> T:
        """Runs `command(client)`, repeatedly while Redis is unreachable. Redis' return or `stop` unblocks it.

        Raises:
            RedisGoneError: Redis was unreachable for `outage_s`, or refuses the credentials or the command.
            redis.ResponseError: any other error reply.
        """
        num_failures, was_refused = 0, False
        while True:
            started = time.monotonic()
            try:
                result = command(self.client)
            except (redis.RedisError, OSError) as error:
                self._outage.check_refused(error)
                if not is_passing(error):
                    raise
                self._on_error(type(error).__name__)
                self._maybe_restarted = True
                if isinstance(error, redis.ResponseError):
                    # The address may resolve to another server by now, and this connection lead to a demoted one.
                    self.client.connection_pool.disconnect(inuse_connections=False)
                was_refused |= self._outage.failed(error)
                self._check_stopped(error)
                num_failures += 1
                self.pause(pause_s(num_failures))
            else:
                self._outage.answered(started, was_refused=was_refused)
                return result

    def pause(self, seconds: float) -> None:
        """Sleeps; returns within 0.1 s after `stop`."""
        wake_at = time.monotonic() + seconds
        while (left := wake_at - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            if self.stopping:
                return

    def memory_share(self) -> float:
        """Returns the share of its `maxmemory` that Redis uses; 0 without a limit."""
        memory = self.call(lambda client: client.info("memory"))
        limit = memory.get("maxmemory", 0)
        return memory["used_memory"] / limit if limit else 0.0

    def restarted(self) -> bool:
        """Returns True once after the server process has changed: the streams must be reconciled."""
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
        # redis-py silently replaces a connection that broke while idle: a restart would go unnoticed.
        self._maybe_restarted = True
        connection.on_connect()

    def _check_stopped(self, error: Exception) -> None:
        since = self._outage.since
        if self._stopped_at is None or since is None:
            return
        if time.monotonic() - max(self._stopped_at, since) >= SHUTDOWN_TIMEOUT_S:
            raise RedisGoneError(
                f"stopped while Redis is away ({error}): what was trained since the last checkpoint is not committed"
            ) from error
