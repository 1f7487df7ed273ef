"""Reads the rollout stream by cursor: a released index becomes ready once, however often its group is appended."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from msgspec import structs

from penstock.consumers.stream.connection import BLOCK_S, TrainerConnection
from penstock.consumers.stream.ledger import Ledger
from penstock.schemas.keys import Field, Keys, Kind, entry_key, is_of_run, number_in, stored_images
from penstock.schemas.policy import FutureVersionError, UnknownVersionError
from penstock.schemas.process import clock
from penstock.schemas.rollout import (
    MAX_ENTRY_BYTES,
    MAX_REASON_CHARACTERS,
    MAX_TRACEBACK_CHARACTERS,
    RecordError,
    RolloutGroup,
    decode_entry,
    decode_group,
    one_line,
    origin_in,
)

log = logging.getLogger(__name__)

START = b"0-0"
LARGEST_CLOCK = 2**63
"""No server's clock shows so many milliseconds. Entry ids begin with it, and go up to 2**64."""
ENTRIES_PER_READ = 64
FIRST_READ_ENTRIES = 8
"""Entries of the first read: their size is not known yet."""
READ_BYTES = 2 * 1024 * 1024
"""Target size of one read: a reply larger than the processor's caches takes 1.5 times as long per byte."""
LagOf = Callable[[int], int]


class ReadyGroup(NamedTuple):
    """A group that was read and is not yet settled."""

    entry_id: bytes
    group: RolloutGroup
    received_s: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Refused:
    """A record that cannot be trained on. `index` is None if it cannot be read.

    It becomes a dead letter, which is never deleted: `reason` and `producer` are one line (`one_line`), `payload` has
    at most `MAX_ENTRY_BYTES` (the reason says if it was cut), `traceback` at most `MAX_TRACEBACK_CHARACTERS`.
    """

    index: int | None
    reason: str
    payload: bytes
    entry_id: bytes = b""
    num_received: int = 0
    """Good groups that were read before it."""
    producer: str = ""
    traceback: str = ""
    """Of the error for which the producer gave it up."""
    samplers: tuple[str, ...] = ()
    """The instances that sampled it, by its payload; empty if unknown, or if its rows are not the reason."""


class Reader:
    """The cursor, the ready groups, and the records refused since `take_refused`.

    It acknowledges nothing: after a crash, ready groups are read again from the start of the stream, which a checkpoint
    trims.

    check: raises RecordError for a group that the trainer cannot reproduce.
    renew: called for a stream whose entry ids are used up, once all its entries are read; it deletes the stream.
    run_id: of the run, see `penstock.schemas.keys.Commit`.
    """

    def __init__(
        self,
        connection: TrainerConnection,
        keys: Keys,
        ledger: Ledger,
        group_size: int,
        check: Callable[[RolloutGroup], None] = lambda group: None,
        renew: Callable[[], object] = lambda: None,
        run_id: str = "",
    ) -> None:
        self._connection = connection
        self._renew, self._run_id = renew, run_id
        self._has_dropped = False
        self._stream, self._image_store = keys.rollouts, keys.images
        self._ledger = ledger
        self._group_size = group_size
        self._check = check
        self.cursor = START
        self._count = FIRST_READ_ENTRIES
        self.ready: dict[int, ReadyGroup] = {}
        """By index, in order of arrival."""
        self.on_spans: Callable[[int, bytes], None] = lambda index, spans: None
        """Called with what came with a group for its trace; see `GroupTraces.sampled`."""
        self._refused: list[Refused] = []
        self._refused_indexes: set[int] = set()
        self._refused_entries: set[bytes] = set()
        """Refused entries that name no released index, while they are on the stream."""
        self._stored: dict[bytes, dict[str, bytes]] = {}
        """The fields of `Keys.images` that belong to each entry on the stream, by digest."""
        self.num_received = 0
        """Good groups read so far."""

    def read(self, lag_of: LagOf, *, block: bool) -> int:
        """Reads new entries: each becomes ready, is refused, or is dropped as a duplicate. Returns their number.

        With `block` waits at most `BLOCK_S` for the first; a producer that appends one unblocks it.
        """
        block_ms = int(BLOCK_S * 1000) if block else None
        count = self._count
        reply = self._connection.call(
            lambda client: client.xread({self._stream: self.cursor}, count=count, block=block_ms)
        )
        entries = reply[0][1] if reply else []
        if entries:
            num_bytes = sum(len(fields.get(Field.PAYLOAD, b"")) for _, fields in entries)
            self._count = max(1, min(ENTRIES_PER_READ, READ_BYTES * len(entries) // max(1, num_bytes)))
        for entry_id, fields in entries:
            self._receive(entry_id, fields, lag_of)
            self.cursor = entry_id
            if entry_key(entry_id)[0] <= LARGEST_CLOCK:
                self._ledger.last_read = max(self._ledger.last_read.encode(), entry_id, key=entry_key).decode()
        if entry_key(self.cursor)[0] > LARGEST_CLOCK and len(entries) < count:
            self._renew()
            self.rewind()
        return len(entries)

    def read_to_end(self, lag_of: LagOf) -> None:
        while self.read(lag_of, block=False):
            pass

    def rewind(self) -> None:
        """Makes the next read start at the stream's start; settled and ready groups are dropped as duplicates."""
        self.cursor = START

    def first_unsettled(self) -> bytes:
        """Returns the entry id up to which the stream may be trimmed: the first ready group's, never past the cursor.

        On a server that was emptied and whose clock is behind, ids of ready groups are above those still to be read.
        """
        milliseconds, sequence = entry_key(self.cursor)
        ids = [
            f"{milliseconds}-{min(sequence + 1, 2**64 - 1)}".encode(),
            *(held.entry_id for held in self.ready.values()),
        ]
        return min(ids, key=entry_key)

    def images_before(self, first: bytes) -> list[bytes]:
        """Returns the image files that go with the entries before `first`, as fields of `Keys.images`."""
        kept = entry_key(first)
        return [file for entry, files in self._stored.items() if entry_key(entry) < kept for file in files.values()]

    def forget_trimmed(self, first: bytes) -> None:
        """Forgets refused entries that will not be read again, after the stream was trimmed up to `first`.

        Ids past the cursor are forgotten too: they date from before a server whose clock is behind was emptied.
        """
        kept, last = entry_key(first), entry_key(self.cursor)
        self._stored = {entry: files for entry, files in self._stored.items() if kept <= entry_key(entry)}
        self._refused_entries = {entry for entry in self._refused_entries if kept <= entry_key(entry) <= last}

    def _receive(self, entry_id: bytes, fields: dict[bytes, bytes], lag_of: LagOf) -> None:
        payload = fields.get(Field.PAYLOAD, b"")
        if stored := stored_images(fields.get(Field.IMAGES)):
            self._stored[entry_id] = stored
        index = number_in(fields.get(Field.INDEX))
        if not is_of_run(fields, self._run_id):
            self._drop_of_another_run(entry_id)
            return
        if index is None:
            found = _shown(fields.get(Field.INDEX))
            self.refuse(Refused(None, f"poison: index field {found}", payload, entry_id))
            return
        if index in self._ledger.settled or index in self.ready or index in self._refused_indexes:
            self._drop_duplicate(entry_id, payload)
            return
        if self._ledger.stale.get(index) == entry_id.decode():
            return  # read again after a resume: the index is, or was, to be sampled again
        requeued = self._ledger.requeued.get(index)
        if requeued is not None and entry_key(entry_id) <= entry_key(requeued.after.encode()):
            return  # read again after a resume: the entry for which the index died
        if not 1 <= index <= self._ledger.num_released:
            self.refuse(Refused(None, f"poison: index {index} was never released", payload, entry_id))
            return
        if spans := fields.get(Field.SPANS):
            self.on_spans(index, spans)
        if fields.get(Field.KIND) == Kind.DEAD:
            names = {Field.REASON: b"unknown", Field.PRODUCER: b"", Field.TRACEBACK: b""}
            reason, producer, trace = (fields.get(*each).decode(errors="replace") for each in names.items())
            trace = trace[-MAX_TRACEBACK_CHARACTERS:]
            self.refuse(Refused(index, reason, payload, entry_id, producer=one_line(producer), traceback=trace))
            return
        try:
            group = self._decode(payload, index, lag_of, stored)
        except RecordError as error:
            self.refuse(_for_its_rows(index, error, payload, entry_id))
            return
        try:
            self.ready[index] = ReadyGroup(entry_id, self._with_task(group), clock.steady_s())
        except RecordError as error:
            self.refuse(Refused(index, f"poison: {error}", payload, entry_id, producer=one_line(group.producer_id)))
            return
        self.num_received += 1

    def _drop_of_another_run(self, entry_id: bytes) -> None:
        """Says once that a producer of another run has appended: it may have sampled many groups."""
        if not self._has_dropped:
            log.warning("groups of another run of this name are dropped, first %s", entry_id.decode())
        self._has_dropped = True

    def _drop_duplicate(self, entry_id: bytes, payload: bytes) -> None:
        """Counts a duplicate, unless it is read again. Its environment counts only if the run has one of that name."""
        if entry_key(entry_id) <= entry_key(self._ledger.last_read.encode()):
            return
        self._ledger.num_duplicates_dropped += 1
        group = readable(payload)
        name = "" if group is None or group.environment not in self._ledger.histories else group.environment
        self._ledger.attrition.add(name, "duplicate", group, self._group_size)

    def take_refused(self) -> list[Refused]:
        """Returns the records refused since the last call, to be settled."""
        refused, self._refused = self._refused, []
        self._refused_indexes.clear()
        return refused

    @property
    def refused_indexes(self) -> set[int]:
        """Indexes of refused records that were not taken yet."""
        return self._refused_indexes

    def refuse(self, record: Refused) -> None:
        """Adds a record that cannot be trained on."""
        if record.index is not None:
            self._refused_indexes.add(record.index)
        elif record.entry_id in self._refused_entries:
            return  # read again after `rewind`: without an index it would leave a letter each time
        else:
            self._refused_entries.add(record.entry_id)
        reason, payload = _letter(record.reason, record.payload)
        self._refused.append(replace(record, reason=reason, payload=payload, num_received=self.num_received))

    def _decode(self, payload: bytes, index: int, lag_of: LagOf, stored: Mapping[str, bytes]) -> RolloutGroup:
        def image(digest: str) -> bytes | None:
            field = stored.get(digest, "")
            return self._connection.call(lambda client: client.hget(self._image_store, field))

        group = decode_entry(payload, image=image)
        if group.index != index:
            raise RecordError(f"index: the entry says {index}, its payload {group.index}")
        if len(group.rollouts) > self._group_size:
            raise RecordError(f"rollouts: {len(group.rollouts)} siblings, expected at most {self._group_size}")
        self._check(group)
        for version in group_versions(group):
            try:
                lag_of(version)
            except FutureVersionError as error:
                raise RecordError(f"version_spans: {error}") from error
            except UnknownVersionError:
                continue  # a lag is assumed for it when the batch is packed
        return group

    def _with_task(self, group: RolloutGroup) -> RolloutGroup:
        """Returns the group with its index's task.

        Raises:
            RecordError: it is of another task. Its rows may be sound: the index may have had that task before a
            rollback.
        """
        task = self._ledger.tasks.get(group.index)
        if task is None:
            return group
        posed = group.environment or task.environment, group.task or task.number
        if posed != task:
            raise RecordError(
                f"task: index {group.index} is task {task.number} of environment {task.environment!r}, its payload has "
                f"task {posed[1]} of {posed[0]!r}"
            )
        return structs.replace(group, environment=task.environment, task=task.number)


def readable(payload: bytes) -> RolloutGroup | None:
    """Returns the group in a payload, which may be dead and incomplete; None if it cannot be read."""
    try:
        return decode_group(payload, dead=True)
    except RecordError:
        return None


def group_versions(group: RolloutGroup) -> set[int]:
    """Returns every known version that sampled a token of the group."""
    return {
        span.version
        for rollout in group.rollouts
        for segment in rollout.segments
        for span in segment.version_spans
        if span.version >= 0
    }


def _for_its_rows(index: int, error: RecordError, payload: bytes, entry_id: bytes) -> Refused:
    """Returns the record of a group that is refused for its rows, with its samplers if its payload names them."""
    reason = f"poison: {error}"
    if (origin := origin_in(payload)) is None:
        return Refused(index, reason, payload, entry_id)
    if origin.sampled_by:
        reason += f"; sampled by {', '.join(origin.sampled_by)}"
    return Refused(index, reason, payload, entry_id, producer=one_line(origin.producer_id), samplers=origin.samplers)


def _letter(reason: str, payload: bytes) -> tuple[str, bytes]:
    """Cuts reason and payload to the bounds of a dead letter."""
    if len(payload) > MAX_ENTRY_BYTES:
        cut = f" (payload of {len(payload):,} bytes cut to {MAX_ENTRY_BYTES:,})"
        reason = one_line(reason)[: MAX_REASON_CHARACTERS - len(cut)] + cut
        payload = payload[:MAX_ENTRY_BYTES]
    return one_line(reason), payload


def _shown(field: bytes | None) -> str:
    """Returns a field of an entry, cut to what a reason may quote."""
    return repr(field if field is None else field[:MAX_REASON_CHARACTERS])
