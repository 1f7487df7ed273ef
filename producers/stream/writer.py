"""Appends finished groups: the group onto its stream and its prompt off its own, in one MULTI."""

import asyncio
import logging
from collections import deque
from functools import partial
from typing import Any, NamedTuple

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim, Dead, DeadRollout, InFlightTable
from penstock.schemas.keys import DEAD_ROLLOUTS_KEPT, PRODUCERS_GROUP, Field, Keys, Kind
from penstock.schemas.rollout import RecordError, RolloutGroup, encode_group, one_line

log = logging.getLogger(__name__)

MAX_APPEND_BYTES = 1024 * 1024
"""Payload of one round trip, unless a single group is larger. Much more leaves the processors' caches on both sides."""
MAX_APPEND_GROUPS = 64
APPENDS_AT_ONCE = 2
"""While the server takes one in, the next is packed and sent on a connection of its own."""


class _Entry(NamedTuple):
    claim: Claim
    kind: bytes
    field: bytes
    value: bytes


class _Letter(NamedTuple):
    """The letter about an agent's rollout that died; its claim stays open."""

    claim: Claim
    rollout: DeadRollout
    value: bytes


class Writer:
    """Holds finished groups, encoded, until Redis has them. Until then a group keeps its room in the in-flight table,
    which bounds what waits while Redis is away or full."""

    def __init__(
        self, connection: ProducerConnection, keys: Keys, table: InFlightTable, metrics: ProducerMetrics
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._table = table
        self._metrics = metrics
        self._waiting: dict[int, _Entry | _Letter] = {}
        """Everything that Redis does not have yet, numbered in order of arrival."""
        self._unsent: deque[int] = deque()
        """The numbers of entries that no append has taken yet."""
        self._num_put = 0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.num_groups_appended = 0

    def put(self, claim: Claim, outcome: RolloutGroup | Dead) -> bool:
        """Takes the outcome of a claim. A group that violates the wire format (the entry cap, say) becomes a dead one.
        Returns whether it is appended as a group."""
        if isinstance(outcome, RolloutGroup):
            try:
                payload = encode_group(outcome)
            except (RecordError, UnicodeEncodeError) as error:
                outcome = Dead(f"record: {error}")
        if isinstance(outcome, Dead):
            # It may quote an environment's error, of any length and with any characters.
            reason = one_line(outcome.reason)
            log.error("%s is dead: %s", claim, reason)
            entry = _Entry(claim, Kind.DEAD, Field.REASON, reason.encode())
        else:
            entry = _Entry(claim, Kind.GROUP, Field.PAYLOAD, payload)
        self._put(entry)
        return entry.kind == Kind.GROUP

    def put_letter(self, claim: Claim, rollout: DeadRollout) -> None:
        """Takes an agent's rollout that is missing from its group."""
        self._put(_Letter(claim, rollout, one_line(rollout.reason).encode()))

    def _put(self, entry: "_Entry | _Letter") -> None:
        self._waiting[self._num_put] = entry
        self._unsent.append(self._num_put)
        self._num_put += 1
        self._drained.clear()
        self._wake.set()

    async def run(self) -> None:
        """Waits for finished groups, which `put` unblocks, and appends them. Runs until cancelled."""
        appending = [asyncio.create_task(self._append_batches()) for _ in range(APPENDS_AT_ONCE)]
        try:
            await asyncio.gather(*appending)
        finally:
            for task in appending:
                task.cancel()
            await asyncio.wait(appending)

    async def _append_batches(self) -> None:
        """Waits for an entry, then for Redis to accept the batch that begins with it."""
        while True:
            await self._wake.wait()
            if not self._unsent:
                self._wake.clear()
                continue
            numbers = self._next_batch()
            batch = [self._waiting[number] for number in numbers]
            num_bytes = sum(len(entry.value) for entry in batch)
            await self._connection.retrying(partial(self._append, batch), num_bytes=num_bytes)
            for number in numbers:
                entry = self._waiting.pop(number)
                if isinstance(entry, _Entry):
                    self._settle(entry)
            if not self._waiting:
                self._drained.set()

    async def drain(self) -> None:
        """Waits until everything put so far is appended."""
        await self._drained.wait()

    def _next_batch(self) -> list[int]:
        batch = [self._unsent.popleft()]
        size = len(self._waiting[batch[0]].value)
        while self._unsent and len(batch) < MAX_APPEND_GROUPS:
            size += len(self._waiting[self._unsent[0]].value)
            if size > MAX_APPEND_BYTES:
                break
            batch.append(self._unsent.popleft())
        return batch

    async def _append(self, batch: list[_Entry | _Letter]) -> None:
        """One MULTI. EXEC does not roll back, so no command in it may be refused for its content: ids are automatic."""
        keys = self._keys
        pipeline = self._connection.commands.pipeline(transaction=True)
        by_stream: dict[str, list[bytes]] = {}
        for entry in batch:
            if isinstance(entry, _Letter):
                fields: Any = {
                    Field.INDEX: entry.claim.index,
                    Field.ROLLOUT: entry.rollout.id,
                    Field.PRODUCER: entry.rollout.producer_id,
                    Field.REASON: entry.value,
                }
                pipeline.xadd(keys.dead_rollouts, fields, maxlen=DEAD_ROLLOUTS_KEPT, approximate=True)
                continue
            claim, kind, field, value = entry
            by_stream.setdefault(claim.stream, []).append(claim.entry_id)
            if claim.evaluation_id is None:
                target, name, subject = keys.rollouts, Field.INDEX, str(claim.index)
            else:
                target, name, subject = keys.evaluation_results, Field.EVALUATION, claim.evaluation_id
            pipeline.execute_command("XADD", target, "*", name, subject, Field.KIND, kind, field, value)
        for stream, ids in by_stream.items():
            pipeline.execute_command("XACK", stream, PRODUCERS_GROUP, *ids)
            pipeline.execute_command("XDEL", stream, *ids)
        await pipeline.execute()

    def _settle(self, entry: _Entry) -> None:
        if entry.claim.evaluation_id is None:
            self.num_groups_appended += 1
            self._metrics.groups_appended.labels(entry.kind.decode()).inc()
        else:
            self._metrics.evaluations_appended.inc()
        self._table.remove(entry.claim)
        self._metrics.in_flight.set(len(self._table))
