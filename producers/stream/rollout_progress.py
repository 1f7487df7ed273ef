"""The progress of rollouts in flight, kept in Redis for the producer that takes their claims over."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ANSWER_S, ProducerConnection
from penstock.producers.stream.in_flight import Claim, InFlightTable
from penstock.producers.stream.timed_steps import TimedSteps
from penstock.schemas.config import ProducersConfig
from penstock.schemas.keys import Field, Keys
from penstock.schemas.producer_parity import quarantine_in
from penstock.schemas.rollout import MAX_ENTRY_BYTES, RecordError, RolloutGroup, decode_group, encode_group

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGEST_SHARE = 0.008
"""The share of a processor's time that saving may take: below 1% together with what the event loop sends for it."""
SHORTEST_TTL_S = 3600.0
"""Progress that is not taken over, renewed or dropped with its claim expires after this long."""
BATCH_BYTES = 1024 * 1024
"""Groups are written together up to this size: one write costs more than encoding a short group."""
FULL_PAUSE_S = 60.0
"""Nothing is saved for this long after Redis was at its memory limit."""
LARGEST_PARTS = 4 * MAX_ENTRY_BYTES
"""The most bytes of one group's parts that are read: calls take up to twice an entry, and their text as much again."""


class _SavedPart(NamedTuple):
    mark: object
    num_tokens: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Saved:
    """What Redis has of a claim's progress.

    num_bytes: that it has or will have.
    grows_since: monotonic seconds; None until it has more than at first.
    parts: of a conversation group, by name, like what follows.
    num_recoveries: outages of Redis before the parts were written; a later one may have lost them.
    has_begun: parts were written, with this producer as their holder.
    is_given_up: there was no room for them.
    """

    num_tokens: int = 0
    num_bytes: int = 0
    grows_since: float | None = None
    parts: dict[str, _SavedPart] = field(default_factory=dict)
    num_recoveries: int = 0
    has_begun: bool = False
    is_given_up: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def clear(self) -> None:
        self.num_tokens, self.num_bytes, self.parts = 0, 0, {}


class RolloutProgress:
    """Saves what the groups in flight have sampled and finds what others have saved.

    A group's progress is one string under its index, written as a whole: concurrent writers leave the last one's. A
    group that converses has a hash instead, of which only changed parts are written. Their names begin with the
    writer's instance, and a field names the instance that counts: the last to begin. A producer that was taken for dead
    finds another's instance there and gives the group up.

    Progress is a hint, never an acknowledgement: no write is repeated, and a failed one ends nothing. A group's append
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
        producer_id: str,
    ) -> None:
        self._connection = connection
        self._producer_id = producer_id
        self._keys = keys
        self._table = table
        self._metrics = metrics
        self._config = config
        self._instance = instance
        self._ttl_s = int(max(SHORTEST_TTL_S, 2 * config.generation_deadline_s))
        self._saved: dict[Claim, _Saved] = {}
        self._saving = asyncio.Lock()
        self._full_until = 0.0
        self._failing: set[str] = set()
        """The reasons logged so far; all but `size` are logged again after a successful write."""

    async def run(self) -> None:
        """Waits half of `progress_s`, or longer if saving would take more than its share of the processor's time, and
        saves; runs until cancelled. Groups are written as a whole: without the wait the cost of long rollouts would
        grow with the square of their length.

        A group loses with its producer what it has sampled since it was last saved: half of `progress_s`, half of that
        if it was too young for one saving, and the time between its turns in two of them.
        """
        saving_s, pause_s = 0.0, self._config.progress_s / 2
        while pause_s:
            await asyncio.sleep(max(pause_s, saving_s / LARGEST_SHARE))
            saving = TimedSteps(self.save(pause_s / 2))
            await saving
            saving_s = (saving_s + saving.cpu_s) / 2  # a single slow one puts the next off by half of its time

    async def save(self, min_age_s: float = 0.0) -> None:
        """Saves what has grown, the oldest groups first.

        min_age_s: younger groups are left out: most short ones are done before the next saving.
        """
        if not self._config.progress_s:
            return
        async with self._saving:
            started = time.monotonic()
            self._saved = {claim: saved for claim, saved in self._saved.items() if self._holds(claim)}
            if self._connection.is_full:
                await self._make_room()
            batch: dict[Claim, tuple[int, bytes]] = {}
            num_bytes = 0
            for claim in self._table:
                if time.monotonic() < self._full_until:
                    break
                # An evaluation is asked for again as a whole, and its index is another prompt's key.
                if claim.evaluation_id is not None or time.monotonic() - (claim.generating_since or 0.0) < min_age_s:
                    continue
                if claim.converses:
                    await self.save_parts(claim)
                elif (payload := self._payload(claim)) is not None:
                    batch[claim] = payload
                    num_bytes += len(payload[1])
                    if num_bytes >= BATCH_BYTES:
                        await self._write(batch)
                        batch, num_bytes = {}, 0
            await self._write(batch)
            self._metrics.progress_write_s.observe(time.monotonic() - started)

    async def save_parts(self, claim: Claim, *, running: bool = True) -> None:
        """Saves the parts of one group that have changed, all of them the first time. Without room for all of them none
        is kept: the group could not be continued from some.

        running: also saves what unfinished calls have sampled.
        """
        if claim.parts is None or not self._config.progress_s:
            return
        saved = self._saved.setdefault(claim, _Saved())
        async with saved.lock:
            is_full = time.monotonic() < self._full_until
            if saved.is_given_up or is_full or claim.parts is None or not self._holds(claim):
                return
            if saved.num_recoveries != self._connection.num_recoveries:
                saved.parts, saved.num_recoveries = {}, self._connection.num_recoveries
            if saved.has_begun and not saved.parts:  # written as a whole again, if it is still this producer's
                await self.find_moved([claim])
                if claim.has_moved:
                    return
            before = saved.parts
            try:
                parts = {part.name: part for part in claim.parts(running)}
                changed = {
                    name: part.encode()
                    for name, part in parts.items()
                    if part.encode is not None and (name not in before or before[name].mark != part.mark)
                }
            except (TypeError, ValueError, OverflowError) as error:  # a prompt's or a reward's values are the user's
                await self._give_up(claim, saved, "%s: %s", claim, error)
                return
            gone = before.keys() - parts.keys()
            if not changed and not gone:
                return
            after = {name: part for name, part in before.items() if name not in gone}
            for name, data in changed.items():
                after[name] = _SavedPart(parts[name].mark, parts[name].num_tokens, len(data))
            num_bytes = sum(part.num_bytes for part in after.values())
            if num_bytes > self._room(claim):
                limit = self._config.progress_mb
                await self._give_up(claim, saved, "%s: no room left (producers.progress_mb = %d)", claim, limit)
                return
            key, prefix = self._keys.progress(claim.index), f"{self._instance}/"
            fields: dict[Any, Any] = {prefix + name: data for name, data in changed.items()}
            pipeline = self._connection.commands.pipeline(transaction=True)
            if before:
                pipeline.hget(key, Field.INSTANCE)
            else:
                pipeline.delete(key)
                fields |= {Field.PRODUCER: self._producer_id, Field.INSTANCE: self._instance}
            if fields:
                pipeline.hset(key, mapping=fields)
            if gone:
                pipeline.hdel(key, *(prefix + name for name in gone))
            pipeline.expire(key, self._ttl_s)
            if (answers := await self._tried(pipeline.execute)) is None:
                return
            if saved.parts is not before:  # all was dropped meanwhile
                await self._delete(claim)
                return
            if before and answers[0] != self._instance.encode():
                saved.parts = {}  # lost by Redis: the next time as a whole
                claim.has_moved = answers[0] is not None
                return
            saved.has_begun, saved.parts = True, after
            num_tokens = sum(part.num_tokens for part in after.values())
            await self._has_written(claim, saved, num_tokens, num_bytes, sum(map(len, changed.values())))

    async def find_moved(self, claims: Iterable[Claim] | None = None) -> None:
        """Checks which claims, by default all that converse, another producer has begun to continue."""
        claims = [claim for claim in claims or self._table if claim in self._saved and self._saved[claim].has_begun]
        if not claims:
            return
        pipeline = self._connection.commands.pipeline(transaction=False)
        for claim in claims:
            pipeline.hget(self._keys.progress(claim.index), Field.INSTANCE)
            pipeline.expire(self._keys.progress(claim.index), self._ttl_s)  # an agent may be silent for long
        if (answers := await self._tried(pipeline.execute)) is not None:
            for claim, instance in zip(claims, answers[::2], strict=True):
                claim.has_moved |= instance not in (None, self._instance.encode())

    async def find_parts(self, claim: Claim) -> dict[str, bytes]:
        """Returns the parts that a claim's last holder saved, by name; none if there is nothing to continue from.

        Repeated until Redis answers: to begin again would drop what agents were told.
        """
        if (fields := await self._left_by_others(claim, self._connection.commands.hgetall)) is None:
            return {}
        prefix = fields.get(Field.INSTANCE, b"") + b"/"
        parts = {
            name.removeprefix(prefix).decode(errors="replace"): data
            for name, data in fields.items()
            if name.startswith(prefix)
        }
        if (num_bytes := sum(map(len, parts.values()))) > LARGEST_PARTS:
            self._unreadable(claim, f"{num_bytes:,} bytes, expected at most {LARGEST_PARTS:,}")
            return {}
        return parts

    async def forget(self, claim: Claim) -> None:
        """Drops one claim's progress, whoever saved it."""
        if claim in self._saved:
            self._saved[claim].clear()
        await self._delete(claim)

    async def end(self) -> None:
        """Drops what was saved, and saves nothing from now on."""
        self._full_until = math.inf
        await self._drop()

    async def _drop(self) -> None:
        claims = [claim for claim in self._table if claim.has_progress]
        for saved in self._saved.values():
            saved.clear()
        if claims:
            await self._delete(*claims)

    async def find(self, claim: Claim) -> RolloutGroup | None:
        """Returns a claim's group as far as an earlier holder sampled it, if that was saved and can be read.

        Repeated until Redis answers: to begin again would drop it.
        """
        if claim.evaluation_id is not None:
            return None
        if (payload := await self._left_by_others(claim, self._connection.commands.get)) is None:
            return None
        try:
            found = _decoded(claim, payload)
        except RecordError as error:
            self._unreadable(claim, error)
            return None
        return None if await self.is_quarantined(claim, found.samplers, found.producer_id) else found

    async def _left_by_others(self, claim: Claim, read: Callable[[str], Awaitable[Any]]) -> Any:
        """Reads a claim's progress by the command `read`; returns None if there is none, or none to continue from.

        The last attempt starts again: what the others continued from may be what ended them.
        """
        if not self._config.progress_s:
            return None
        key = self._keys.progress(claim.index)
        try:
            found = await self._connection.retrying(lambda: read(key))
        except ResponseError as error:
            self._unreadable(claim, error)
            return None
        if found is None or found == {}:
            return None
        claim.has_progress = True
        if 1 < claim.attempt >= self._config.max_attempts:
            log.warning("%s starts again at its last attempt", claim)
            return None
        return found

    async def left_by_the_dead(self, claim: Claim) -> RolloutGroup | None:
        """Returns the unfinished group of a claim that no producer continues; None if it is unknown, or converses. Its
        progress is dropped with the claim: it may be what ends its producers."""
        if claim.evaluation_id is not None:
            return None
        claim.has_progress = True
        payload: Any = await self._tried(lambda: self._connection.commands.get(self._keys.progress(claim.index)))
        with contextlib.suppress(RecordError):
            return None if payload is None else _decoded(claim, payload)
        return None

    async def is_quarantined(self, claim: Claim, samplers: Sequence[str], holder: str) -> bool:
        """Returns whether one of the instances that have sampled a claim's progress is quarantined, and logs it.
        holder: the last one, for the log."""
        told: Any = await self._tried(lambda: self._connection.commands.hmget(self._keys.parity, list(samplers)))
        if any(map(quarantine_in, told or ())):
            log.warning("%s starts again, its progress is of a quarantined producer: %s", claim, holder)
            return True
        return False

    def _unreadable(self, claim: Claim, why: object) -> None:
        claim.has_progress = True  # dropped with the claim
        self._metrics.progress_failures.labels("record").inc()
        log.warning("%s starts again, its progress cannot be read: %s", claim, why)

    def _payload(self, claim: Claim) -> tuple[int, bytes] | None:
        """Returns the tokens and encoding of a claim's group, and reserves its room; None if there is nothing new, or
        no room."""
        group = claim.so_far()
        if group is None:
            return None
        num_tokens = sum(rollout.num_sampled_tokens for rollout in group.rollouts)
        saved = self._saved.setdefault(claim, _Saved())
        if num_tokens <= saved.num_tokens:
            return None
        try:
            payload = encode_group(group.finished_by(self._instance), dead=True)
        except (RecordError, UnicodeEncodeError) as error:
            self._fail("size", "%s: %s", claim, error)
            return None
        if len(payload) > self._room(claim):
            self._fail("size", "%s: no room left (producers.progress_mb = %d)", claim, self._config.progress_mb)
            return None
        saved.num_bytes = len(payload)
        return num_tokens, payload

    async def _write(self, batch: Mapping[Claim, tuple[int, bytes]]) -> None:
        """Writes the tokens and encodings of claims' groups."""
        if not batch or time.monotonic() < self._full_until:
            return
        pipeline = self._connection.commands.pipeline(transaction=False)
        for claim, (_, payload) in batch.items():
            pipeline.set(self._keys.progress(claim.index), payload, ex=self._ttl_s)
            claim.has_progress = True  # of a batch that fails Redis may have a part
        if await self._tried(pipeline.execute) is not None:
            for claim, (num_tokens, payload) in batch.items():
                await self._has_written(claim, self._saved[claim], num_tokens, len(payload), len(payload))

    async def _has_written(
        self, claim: Claim, saved: _Saved, num_tokens: int, num_bytes: int, num_written: int
    ) -> None:
        """Records what Redis has of a claim, and how many bytes of it were written now."""
        claim.has_progress = True
        self._failing &= {"size"}
        self._metrics.progress_tokens.labels("saved").inc(max(0, num_tokens - saved.num_tokens))
        if 0 < saved.num_tokens < num_tokens:  # the first time it may be an earlier holder's
            saved.grows_since = saved.grows_since or time.monotonic()
            claim.has_proved |= time.monotonic() - saved.grows_since >= self._config.claim_idle_s
        self._metrics.progress_bytes.inc(num_written)
        saved.num_tokens, saved.num_bytes = num_tokens, num_bytes
        if not self._holds(claim) or time.monotonic() < self._full_until:  # appended, or all was dropped, meanwhile
            await self._delete(claim)

    def _room(self, claim: Claim) -> float:
        """Returns the most bytes that a claim's progress may take."""
        others = sum(saved.num_bytes for other, saved in self._saved.items() if other is not claim)
        return self._config.progress_mb * 1e6 - others

    async def _give_up(self, claim: Claim, saved: _Saved, why: str, *values: object) -> None:
        saved.is_given_up = True
        self._fail("size", why, *values)
        await self.forget(claim)

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
        """Returns the answer to a command; None if it fails or takes too long."""
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


def _decoded(claim: Claim, payload: bytes) -> RolloutGroup:
    """Raises RecordError: it cannot be read, or is of another index."""
    found = decode_group(payload, dead=True)
    if found.index != claim.index:
        raise RecordError(f"index: {found.index}, expected {claim.index}")
    return found
