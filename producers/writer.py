"""Appends finished groups: the group onto its stream and its prompt off its own, in one MULTI."""

import asyncio
import logging
from collections import deque
from functools import partial
from typing import NamedTuple

from producers.connection import Connection
from producers.episode import Dead
from producers.in_flight import Claim, InFlightTable
from producers.metrics import ProducerMetrics
from schemas.keys import PRODUCERS_GROUP, Field, Keys, Kind
from schemas.rollout import RecordError, RolloutGroup, encode_group

log = logging.getLogger(__name__)

MAX_APPEND_BYTES = 8 * 1024 * 1024
"""Payload of one round trip, unless a single group is larger."""
MAX_APPEND_GROUPS = 64


class _Entry(NamedTuple):
    claim: Claim
    kind: bytes
    field: bytes
    value: bytes


class Writer:
    """Finished groups wait here, encoded, until Redis has them. A group keeps its room in the in-flight table until
    then, so that what waits while Redis is away or full stays bounded."""

    def __init__(self, connection: Connection, keys: Keys, table: InFlightTable, metrics: ProducerMetrics) -> None:
        self._connection = connection
        self._keys = keys
        self._table = table
        self._metrics = metrics
        self._waiting: deque[_Entry] = deque()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.num_groups_appended = 0

    def put(self, claim: Claim, outcome: RolloutGroup | Dead) -> None:
        """Takes a finished claim. A group that breaks the record's contract (the entry cap, say) becomes a dead one."""
        if isinstance(outcome, RolloutGroup):
            try:
                payload = encode_group(outcome)
            except RecordError as error:
                outcome = Dead(f"record: {error}")
        if isinstance(outcome, Dead):
            log.error("%s is dead: %s", claim, outcome.reason)
            entry = _Entry(claim, Kind.DEAD, Field.REASON, outcome.reason.encode())
        else:
            entry = _Entry(claim, Kind.GROUP, Field.PAYLOAD, payload)
        self._waiting.append(entry)
        self._drained.clear()
        self._wake.set()

    async def run(self) -> None:
        """Waits for finished groups and appends all that are there; Redis taking them unblocks it. Until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._next_batch()
                await self._connection.retrying(partial(self._append, batch))
                for entry in batch:
                    self._waiting.popleft()
                    self._settle(entry)
            self._drained.set()

    async def drain(self) -> None:
        """Waits until everything put so far is appended."""
        await self._drained.wait()

    def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        for entry in self._waiting:
            size += len(entry.value)
            if batch and (size > MAX_APPEND_BYTES or len(batch) == MAX_APPEND_GROUPS):
                break
            batch.append(entry)
        return batch

    async def _append(self, batch: list[_Entry]) -> None:
        """One MULTI. EXEC does not roll back, so nothing in it can be refused for its content: ids are automatic."""
        keys = self._keys
        pipeline = self._connection.commands.pipeline(transaction=True)
        by_stream: dict[str, list[bytes]] = {}
        for claim, kind, field, value in batch:
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
