"""What is kept in Redis of rollouts in flight for the producers that take their claims over: its room, and its end."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ANSWER_S, ProducerConnection
from penstock.producers.stream.in_flight import Claim, InFlightTable
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import Keys
from penstock.schemas.producer_parity import quarantine_in

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PROGRESS_MB = 64.0
"""Most memory in Redis for the progress of one producer's rollouts; the oldest rollouts come first."""
LARGEST_SHARE = 0.006
"""The share of a processor's time that finding out what is new may take: below 1% together with what sending takes."""
SHORTEST_TTL_S = 3600.0
"""Progress that is not taken over, renewed or dropped with its claim expires after this long."""
FULL_PAUSE_S = 60.0
"""Nothing is saved for this long after Redis was at its memory limit."""


@dataclass(slots=True, eq=False, kw_only=True)
class Saved:
    """What Redis has of a claim's progress.

    num_bytes: that it has or will have.
    grows_since: monotonic seconds; None until it has more than at first.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    grows_since: float | None = None

    def clear(self) -> None:
        self.num_tokens, self.num_bytes = 0, 0


class ProgressStore:
    """The progress of one producer's claims in Redis, each under its index.

    It is a hint, never an acknowledgement: no write is repeated, and a failed one ends nothing. A group's append drops
    its progress in the same MULTI. At the memory limit all that this producer has saved is dropped at once.
    """

    def __init__(
        self,
        connection: ProducerConnection,
        keys: Keys,
        table: InFlightTable,
        metrics: ProducerMetrics,
        config: ProducersConfig,
    ) -> None:
        self.connection = connection
        self.commands: Any = connection.commands
        self.keys = keys
        self.table = table
        self.metrics = metrics
        self.config = config
        self.ttl_s = int(max(SHORTEST_TTL_S, 2 * config.generation_deadline_s))
        self.saved: dict[Claim, Saved] = {}
        self._full_until = 0.0
        self._failing: set[str] = set()
        """The reasons logged so far; all but `size` are logged again after a successful write."""

    @property
    def is_closed(self) -> bool:
        """True while nothing is saved: Redis is full, or the run is finished."""
        return not self.config.progress_s or time.monotonic() < self._full_until

    async def read(self, claim: Claim, command: Callable[[str], Awaitable[Any]]) -> Any:
        """Reads a claim's progress; returns None if there is none, or none to continue from. Repeated until Redis
        answers: to begin again would drop what agents were told.

        The last attempt starts again: what the others continued from may be what ended them.
        """
        if not self.config.progress_s:
            return None
        key = self.keys.progress(claim.index, claim.run_id)
        try:
            found = await self.connection.retrying(lambda: command(key))
        except ResponseError as error:
            self.unreadable(claim, error)
            return None
        if not found:
            return None
        claim.has_progress = True
        if 1 < claim.attempt >= self.config.max_attempts:
            log.warning("%s starts again at its last attempt", claim)
            return None
        return found

    def unreadable(self, claim: Claim, why: object) -> None:
        claim.has_progress = True  # dropped with the claim
        self.metrics.progress_failures.labels("record").inc()
        log.warning("%s starts again, its progress cannot be read: %s", claim, why)

    async def is_quarantined(self, claim: Claim, samplers: Sequence[str], holder: str) -> bool:
        """Returns whether one of the instances that have sampled a claim's progress is quarantined, and logs it.
        holder: the last one, for the log."""
        told: Any = await self.tried(lambda: self.commands.hmget(self.keys.parity, list(samplers)))
        if any(map(quarantine_in, told or ())):
            log.warning("%s starts again, its progress is of a quarantined producer: %s", claim, holder)
            return True
        return False

    async def written(self, claim: Claim, saved: Saved, num_tokens: int, num_bytes: int, num_written: int) -> None:
        """Records what Redis has of a claim, and how many bytes of it were written now."""
        self._failing &= {"size"}
        self.metrics.progress_tokens.labels("saved").inc(max(0, num_tokens - saved.num_tokens))
        if 0 < saved.num_tokens < num_tokens:  # the first time it may be an earlier holder's
            saved.grows_since = saved.grows_since or time.monotonic()
            claim.has_proved |= time.monotonic() - saved.grows_since >= self.config.claim_idle_s
        self.metrics.progress_bytes.inc(num_written)
        saved.num_tokens, saved.num_bytes = num_tokens, num_bytes
        if not self.holds(claim) or self.is_closed:  # appended, or all was dropped, meanwhile
            saved.clear()
            await self._delete(claim)

    def has_room(self, claim: Claim, num_bytes: int) -> bool:
        """Returns whether a claim's progress may take so many bytes."""
        self.saved = {other: saved for other, saved in self.saved.items() if self.holds(other)}
        others = sum(saved.num_bytes for other, saved in self.saved.items() if other is not claim)
        if num_bytes + others <= MAX_PROGRESS_MB * 1e6:
            return True
        self.fail("size", "%s: no room left (%g MB)", claim, MAX_PROGRESS_MB)
        return False

    def holds(self, claim: Claim) -> bool:
        return (claim.stream, claim.entry_id) in self.table

    async def forget(self, claim: Claim) -> None:
        """Drops one claim's progress, whoever saved it."""
        if claim in self.saved:
            self.saved[claim].clear()
        await self._delete(claim)

    async def end(self) -> None:
        """Drops what was saved, and saves nothing from now on."""
        self._full_until = math.inf
        await self._drop()

    async def make_room(self) -> None:
        """Drops what was saved, and saves nothing for a while."""
        self._full_until = max(self._full_until, time.monotonic() + FULL_PAUSE_S)
        await self._drop()

    async def _drop(self) -> None:
        for saved in self.saved.values():
            saved.clear()
        if claims := [claim for claim in self.table if claim.has_progress]:
            await self._delete(*claims)

    async def _delete(self, *claims: Claim) -> None:
        keys = [self.keys.progress(claim.index, claim.run_id) for claim in claims]
        if await self.tried(lambda: self.commands.delete(*keys)) is not None:
            for claim in claims:
                claim.has_progress = False

    async def tried(self, command: Callable[[], Awaitable[T]]) -> T | None:
        """Returns the answer to a command; None if it fails or takes too long."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await command()
        except OutOfMemoryError as error:
            self.fail("memory", "Redis is at its memory limit: %s", error)
            await self.make_room()
        except (RedisError, OSError) as error:
            self.fail("redis", "%s: %s", type(error).__name__, error)
        return None

    def fail(self, reason: str, why: str, *values: object) -> None:
        self.metrics.progress_failures.labels(reason).inc()
        if reason not in self._failing:
            log.warning(f"progress of rollouts is not kept: {why}", *values)
        self._failing.add(reason)
