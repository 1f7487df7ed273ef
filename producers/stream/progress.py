"""The progress of rollouts in flight, kept in Redis for whoever takes their claims over."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import OutOfMemoryError, RedisError

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ANSWER_S, ProducerConnection
from penstock.producers.stream.in_flight import Claim, InFlightTable
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import Keys
from penstock.schemas.producer_parity import quarantine_in
from penstock.schemas.rollout import RecordError, RolloutGroup, decode_group, encode_group

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGEST_SHARE = 0.01
"""Of a producer's time that encoding may take."""
SHORTEST_TTL_S = 3600.0
"""Progress that nobody has taken over, renewed or dropped with its claim is gone after this long."""
FULL_PAUSE_S = 60.0
"""Nothing is saved for so long after Redis was at its memory limit."""


class RolloutProgress:
    """Saves what the groups in flight have sampled and finds what others have saved: one string per index, written as a
    whole, so that the last writer's is whole whoever else writes.

    A hint and never an acknowledgement: no command is repeated, and none that fails ends anything. A group's append
    drops its progress in the same MULTI. At the memory limit all that this producer has saved is dropped at once.
    """

    def __init__(
        self,
        connection: ProducerConnection,
        keys: Keys,
        table: InFlightTable,
        metrics: ProducerMetrics,
        config: ProducersConfig,
        instance: str,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._table = table
        self._metrics = metrics
        self._config = config
        self._instance = instance
        self._ttl_s = int(max(SHORTEST_TTL_S, 2 * config.generation_deadline_s))
        self._saved: dict[Claim, tuple[int, int]] = {}
        """Tokens and bytes of the progress that Redis has of this table's claims."""
        self._saving = asyncio.Lock()
        self._full_until = 0.0
        self._failing: set[str] = set()
        """The reasons that were logged; `size` once, the others again after a write."""

    async def run(self) -> None:
        """Waits `progress_s`, or longer if encoding would take more than its share of the processor's time, and saves;
        runs until cancelled."""
        encode_s = 0.0
        while self._config.progress_s:
            await asyncio.sleep(max(self._config.progress_s, encode_s / LARGEST_SHARE))
            encode_s = await self.save(self._config.progress_s / 2)

    async def save(self, min_age_s: float = 0.0) -> float:
        """Saves what has grown, the oldest groups first; returns the processor seconds that encoding took.

        min_age_s: younger groups are left out: most short ones are done before the next time.
        """
        if not self._config.progress_s:
            return 0.0
        async with self._saving:
            encode_s, started = 0.0, time.monotonic()
            self._saved = {claim: size for claim, size in self._saved.items() if self._holds(claim)}
            if self._connection.is_full:
                await self._make_room()
            for claim in self._table:
                if time.monotonic() < self._full_until:
                    break
                if time.monotonic() - (claim.generating_since or 0.0) < min_age_s:
                    continue
                began = time.thread_time()
                payload = self._payload(claim)
                encode_s += time.thread_time() - began
                if payload is not None:
                    await self._write(claim, *payload)
            self._metrics.progress_write_s.observe(time.monotonic() - started)
            return encode_s

    async def end(self) -> None:
        """Drops what was saved, and saves nothing from now on."""
        self._full_until = math.inf
        await self._drop()

    async def _drop(self) -> None:
        claims = [claim for claim in self._table if claim.has_progress]
        self._saved = {}
        if claims:
            await self._delete(*claims)

    async def find(self, claim: Claim) -> RolloutGroup | None:
        """The group of a claim as far as an earlier holder of it came, if that was saved and can be read.

        The last attempt begins anew: what the others went on from may be what ended them.
        """
        if not self._config.progress_s or claim.evaluation_id is not None:
            return None
        commands, key = self._connection.commands, self._keys.progress(claim.index)
        payload: Any = await self._tried(lambda: commands.get(key))
        if payload is None:
            return None
        claim.has_progress = True
        if claim.attempt >= self._config.max_attempts:
            log.warning("%s begins anew at its last attempt", claim)
            return None
        try:
            found = decode_group(payload, dead=True)
            if found.index != claim.index:
                raise RecordError(f"index: {found.index}, expected {claim.index}")
        except RecordError as error:
            self._metrics.progress_failures.labels("record").inc()
            log.warning("%s begins anew, its progress cannot be read: %s", claim, error)
            return None
        samplers = list(found.samplers)
        told: Any = await self._tried(lambda: commands.hmget(self._keys.parity, samplers))
        if any(map(quarantine_in, told or ())):
            log.warning("%s begins anew, its progress is of a quarantined producer: %s", claim, found.producer_id)
            return None
        return found

    def _payload(self, claim: Claim) -> tuple[int, bytes] | None:
        """Tokens and encoding of a claim's group; None if there is nothing new, or no room for it."""
        group = claim.so_far()
        if group is None:
            return None
        num_tokens = sum(rollout.num_sampled_tokens for rollout in group.rollouts)
        tokens_before, bytes_before = self._saved.get(claim, (0, 0))
        if num_tokens <= tokens_before:
            return None
        try:
            payload = encode_group(group.finished_by(self._instance), dead=True)
        except (RecordError, UnicodeEncodeError) as error:
            self._fail("size", "%s: %s", claim, error)
            return None
        num_bytes = sum(size for _, size in self._saved.values()) - bytes_before + len(payload)
        if num_bytes > self._config.progress_mb * 1e6:
            self._fail("size", "%s: no room left (producers.progress_mb = %d)", claim, self._config.progress_mb)
            return None
        return num_tokens, payload

    async def _write(self, claim: Claim, num_tokens: int, payload: bytes) -> None:
        commands, key = self._connection.commands, self._keys.progress(claim.index)
        if not await self._tried(lambda: commands.set(key, payload, ex=self._ttl_s)):
            return
        claim.has_progress = True
        self._failing &= {"size"}
        self._metrics.progress_tokens.labels("saved").inc(num_tokens - self._saved.get(claim, (0, 0))[0])
        self._metrics.progress_bytes.inc(len(payload))
        self._saved[claim] = num_tokens, len(payload)
        if not self._holds(claim) or time.monotonic() < self._full_until:  # appended, or all was dropped, meanwhile
            await self._delete(claim)

    def _holds(self, claim: Claim) -> bool:
        return (claim.stream, claim.entry_id) in self._table

    async def _make_room(self) -> None:
        self._full_until = max(self._full_until, time.monotonic() + FULL_PAUSE_S)
        await self._drop()

    async def _delete(self, *claims: Claim) -> None:
        keys = [self._keys.progress(claim.index) for claim in claims]
        if await self._tried(lambda: self._connection.commands.delete(*keys)) is not None:
            for claim in claims:
                claim.has_progress = False

    async def _tried(self, command: Callable[[], Awaitable[T]]) -> T | None:
        """The answer to a command; None if there is none in time, or another than was asked for."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await command()
        except OutOfMemoryError as error:
            self._fail("memory", "Redis is at its memory limit: %s", error)
            await self._make_room()
        except (RedisError, OSError) as error:
            self._fail("redis", "%s: %s", type(error).__name__, error)
        return None

    def _fail(self, reason: str, why: str, *values: object) -> None:
        self._metrics.progress_failures.labels(reason).inc()
        if reason not in self._failing:
            log.warning(f"progress of rollouts is not kept: {why}", *values)
        self._failing.add(reason)
