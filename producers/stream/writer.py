"""Appends finished groups: adds the group to its stream and removes its prompt, in one MULTI."""

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.producers.stream.in_flight import Claim, Dead, DeadRollout, InFlightTable
from penstock.producers.stream.spans import group_spans
from penstock.schemas.keys import DEAD_ROLLOUTS_KEPT, PRODUCERS_GROUP, Field, Keys, Kind
from penstock.schemas.rollout import RecordError, RolloutGroup, encode_entry, one_line, shown_traceback
from penstock.schemas.spans import encode_spans

log = logging.getLogger(__name__)

MAX_APPEND_BYTES = 1024 * 1024
"""Payload of a round trip, unless a single group is larger. Much more exceeds the processors' caches on both sides."""
MAX_APPEND_GROUPS = 64
APPENDS_AT_ONCE = 2
"""While the server processes one, the next is packed and sent on another connection."""


class _Entry(NamedTuple):
    """fields: names and values, one after the other. is_letter: of an agent's dead rollout; its claim stays open.
    images: files beside the entry, by digest."""

    claim: Claim
    kind: bytes
    fields: tuple[bytes, ...]
    is_letter: bool = False
    images: Mapping[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.fields)) + sum(map(len, self.images.values()))


class Writer:
    """Holds finished groups, encoded, until Redis has them. Until then a group keeps its room in the in-flight table,
    which bounds how many wait while Redis is away or full."""

    def __init__(
        self,
        connection: ProducerConnection,
        keys: Keys,
        table: InFlightTable,
        metrics: ProducerMetrics,
        producer_id: str,
        instance: str,
        traces: bool = False,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._table = table
        self._metrics = metrics
        self._producer_id = producer_id
        self._instance = instance
        self._traces = traces
        self._waiting: dict[int, _Entry] = {}
        """Everything that Redis does not have yet, numbered in order of arrival."""
        self._unsent: deque[int] = deque()
        """The numbers of entries that no append has taken yet."""
        self._num_put = 0
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self.num_groups_appended = 0

    def put(self, claim: Claim, outcome: RolloutGroup | Dead) -> bool:
        """Takes the outcome of a claim. A group that violates the wire format (for example the entry cap) becomes a
        dead one. Returns whether it is appended as a group."""
        if isinstance(outcome, RolloutGroup):
            try:
                encoded, images = encode_entry(outcome.finished_by(self._instance))
                fields = Field.PAYLOAD, encoded, *self._spans(claim, outcome)
                self._put(_Entry(claim, Kind.GROUP, fields, images=images))
                return True
            except (RecordError, UnicodeEncodeError) as error:
                outcome = Dead(f"record: {error}", group=outcome)
        log.error("%s is dead: %s", claim, one_line(outcome.reason), exc_info=outcome.error)
        sampled = () if outcome.group is None else (Field.PAYLOAD, _encode_dead(outcome.group))
        self._put(_Entry(claim, Kind.DEAD, (*sampled, *self._why(outcome), *self._spans(claim, outcome))))
        return False

    def put_letter(self, claim: Claim, rollout: DeadRollout) -> None:
        """Takes an agent's rollout that is missing from its group."""
        self._put(_Entry(claim, Kind.DEAD, (Field.ROLLOUT, rollout.id.encode(), *self._why(rollout)), is_letter=True))

    def _spans(self, claim: Claim, outcome: RolloutGroup | Dead) -> tuple[bytes, ...]:
        if not self._traces or claim.evaluation_id is not None:
            return ()
        return Field.SPANS, encode_spans(group_spans(claim, outcome, self._producer_id))

    def _why(self, dead: Dead | DeadRollout) -> tuple[bytes, ...]:
        # Reason and traceback may quote an environment's error, of any length and with any characters.
        texts = {Field.PRODUCER: self._producer_id, Field.REASON: one_line(dead.reason)}
        if dead.error is not None:
            texts[Field.TRACEBACK] = shown_traceback(dead.error)
        return tuple(part for name, text in texts.items() for part in (name, text.encode(errors="backslashreplace")))

    def _put(self, entry: _Entry) -> None:
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
            num_bytes = sum(entry.num_bytes for entry in batch)
            await self._connection.retrying(partial(self._append, batch), num_bytes=num_bytes)
            for number in numbers:
                entry = self._waiting.pop(number)
                if not entry.is_letter:
                    self._settle(entry)
            if not self._waiting:
                self._drained.set()

    async def drain(self) -> None:
        """Waits until everything put so far is appended."""
        await self._drained.wait()

    def _next_batch(self) -> list[int]:
        batch = [self._unsent.popleft()]
        size = self._waiting[batch[0]].num_bytes
        while self._unsent and len(batch) < MAX_APPEND_GROUPS:
            size += self._waiting[self._unsent[0]].num_bytes
            if size > MAX_APPEND_BYTES:
                break
            batch.append(self._unsent.popleft())
        return batch

    async def _append(self, batch: list[_Entry]) -> None:
        """Appends in one MULTI. EXEC does not roll back, so no command may be refused for its content: ids are
        automatic."""
        keys = self._keys
        pipeline = self._connection.commands.pipeline(transaction=True)
        if done := [
            keys.progress(entry.claim.index, entry.claim.run_id) for entry in batch if entry.claim.has_progress
        ]:
            pipeline.execute_command("DEL", *done)
        by_stream: dict[str, list[bytes]] = {}
        for claim, kind, fields, is_letter, images in batch:
            if is_letter:
                kept = ("MAXLEN", "~", DEAD_ROLLOUTS_KEPT)
                pipeline.execute_command("XADD", keys.dead_rollouts, *kept, "*", Field.INDEX, str(claim.index), *fields)
                continue
            by_stream.setdefault(claim.stream, []).append(claim.entry_id)
            if claim.evaluation_id is None:
                target, name, subject = keys.rollouts, Field.INDEX, str(claim.index)
            else:
                target, name, subject = keys.evaluation_results, Field.EVALUATION, claim.evaluation_id
            origin = (Field.RUN_ID, claim.run_id) if claim.run_id else ()
            if images and claim.evaluation_id is None:  # nothing reads those of an evaluation
                stored = uuid.uuid4().hex  # a new one each time: after a lost reply there may be two entries
                files = chain(*((f"{stored}/{digest}", data) for digest, data in images.items()))
                pipeline.execute_command("HSET", keys.images, *files)
                origin = (*origin, Field.IMAGES, " ".join([stored, *images]))
            pipeline.execute_command("XADD", target, "*", name, subject, Field.KIND, kind, *origin, *fields)
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


def _encode_dead(group: RolloutGroup) -> bytes:
    """Returns a dead group's encoding, without the bytes of its images and then without its rollouts if they do not fit
    an entry; empty if nothing fits."""
    unseen = replace(group, images=dict.fromkeys(group.images or {}, b"") or UNSET)
    for found in (group, unseen, replace(unseen, rollouts=())):
        with contextlib.suppress(RecordError, UnicodeEncodeError):
            return encode_entry(found, dead=True)[0]
    return b""
