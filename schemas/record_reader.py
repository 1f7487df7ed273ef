"""Reads a run's complete record: the batches on the surviving line, each group by itself, while the run goes on too."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from penstock.schemas.record import (
    END,
    FOLDER,
    MAX_FRAME_BYTES,
    BatchEntry,
    BatchHead,
    GroupEntry,
    RecordedGroup,
    SegmentHeader,
    blobs_start,
    decode_blob,
    decode_head,
    decode_index,
    entry_of,
    segment_key,
)
from penstock.schemas.rollout import one_line
from penstock.schemas.rollout_file import MAGIC, SEGMENT_VERSION, RolloutFileError

_U32 = 4


@dataclass
class SegmentFile:
    """One segment as far as it was read.

    entries: its whole batches, in order.
    is_closed: its end was read: nothing more is written to it.
    tail: what follows the last whole batch and is none, in words; empty where nothing does.
    """

    file: Path
    header: SegmentHeader
    offset: int
    entries: list[BatchEntry] = field(default_factory=list)
    is_closed: bool = False
    tail: str = ""


class BatchAt(NamedTuple):
    """A batch on the surviving line and the segment that holds it."""

    segment: SegmentFile
    entry: BatchEntry


class GroupAt(NamedTuple):
    """A recorded group: `head.groups[place]` of its batch. `entry` is that short form."""

    batch: BatchAt
    head: BatchHead
    place: int

    @property
    def entry(self) -> GroupEntry:
        return self.head.groups[self.place]


class Record:
    """The record in a run's folder.

    batches: on the surviving line, in the order in which they were trained; what a rollback undid is left out. Those
        after the trainer's last checkpoint are among them until it is continued without them.
    missing: positions (start, end), half-open, on that line that are not there: dropped for their size, say.
    num_undone: batches left out since a rollback undid them.
    notes: what a reader should know, one line each: missing batches, a segment that was cut off or cannot be read,
        undone batches.

    Raises:
        RolloutFileError: the run has no record, or none of its segments can be read.
    """

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        self._segments: dict[tuple[int, int], SegmentFile] = {}
        self.batches: list[BatchAt] = []
        self.missing: list[tuple[int, int]] = []
        self.num_undone = 0
        self.notes: list[str] = []
        self._problems: list[str] = []
        self.refresh()
        if not self._segments:
            if self._problems:
                raise RolloutFileError(self._problems[0])
            raise RolloutFileError(
                f"{self.folder}: no record of rollouts; expected the folder of a run with record = true in its run file"
            )

    @property
    def segments(self) -> list[SegmentFile]:
        """Every segment, those of undone batches included, by epoch and number."""
        return [self._segments[key] for key in sorted(self._segments)]

    @property
    def header(self) -> SegmentHeader:
        """Of the newest segment."""
        return self.segments[-1].header

    def refresh(self) -> None:
        """Takes in what was written, and leaves out what was dropped or undone, since the last look."""
        found = {key: file for file in self.folder.glob("*") if (key := segment_key(file)) is not None}
        for key in self._segments.keys() - found.keys():
            del self._segments[key]
        self._problems = []
        for key, file in sorted(found.items()):
            try:
                self._take(key, file)
            except FileNotFoundError:  # dropped for its size meanwhile
                self._segments.pop(key, None)
            except RolloutFileError as error:  # the others can be read
                self._problems.append(str(error))
            except OSError as error:
                self._problems.append(f"{file}: cannot be read: {error}")
        self._follow_line()

    def _take(self, key: tuple[int, int], file: Path) -> None:
        segment = self._segments.get(key)
        if segment is not None and file.stat().st_size < segment.offset:  # cut back by its trainer: a failing disk
            segment = None
            del self._segments[key]
        if segment is None:
            segment = self._segments[key] = _open(file, key)
        if not segment.is_closed:
            _extend(segment)

    def head(self, batch: BatchAt) -> BatchHead:
        """What the trainer found of a batch, and its groups in short.

        Raises:
            RolloutFileError: the segment was dropped meanwhile, or altered.
        """
        with _reading(batch) as stream:
            start = blobs_start(_part(stream, batch, 0, _U32))
            return _head(batch, _part(stream, batch, 0, start))

    def group(self, at: GroupAt) -> RecordedGroup:
        """One group whole. Raises RolloutFileError as `head` does."""
        with _reading(at.batch) as stream:
            start = blobs_start(_part(stream, at.batch, 0, _U32))
            return decode_blob(_part(stream, at.batch, start + at.entry.offset, at.entry.length))

    def batch(self, batch: BatchAt) -> tuple[BatchHead, list[RecordedGroup]]:
        """A batch with its groups in the order in which they were trained. Raises RolloutFileError as `head` does."""
        with _reading(batch) as stream:
            start = blobs_start(_part(stream, batch, 0, _U32))
            head = _head(batch, _part(stream, batch, 0, start))
            blobs = (_part(stream, batch, start + group.offset, group.length) for group in head.groups)
            return head, [decode_blob(blob) for blob in blobs]

    def groups(self) -> Iterator[GroupAt]:
        """Every group on the surviving line, in the order in which they were trained; no rollout is read."""
        for batch in self.batches:
            head = self.head(batch)
            yield from (GroupAt(batch, head, place) for place in range(len(head.groups)))

    def find(self, index: int) -> list[GroupAt]:
        """The groups of one released task index: one, or more where it died and was requeued."""
        found = []
        for batch in self.batches:
            if index in batch.entry.indexes:
                found.append(GroupAt(batch, self.head(batch), batch.entry.indexes.index(index)))
        return found

    def _follow_line(self) -> None:
        segments = self.segments
        self.batches, self.missing, self.num_undone, self.notes = [], [], 0, list(self._problems)
        if not segments:
            return
        newest = segments[-1].header
        start, spans = 0, dict[int, tuple[int, int | None]]()
        for epoch, end in sorted(newest.line.items()):
            spans[epoch] = (start, end)
            start = end
        spans[newest.epoch] = (start, None)
        surviving: dict[int, BatchAt] = {}
        for segment in segments:
            first, last = spans.get(segment.header.epoch, (0, 0))
            for entry in segment.entries:
                if first <= entry.position and (last is None or entry.position < last):
                    surviving[entry.position] = BatchAt(segment, entry)  # written twice where an fsync has failed
                else:
                    self.num_undone += 1
        self.batches = [surviving[position] for position in sorted(surviving)]
        self._note(segments, newest)

    def _note(self, segments: list[SegmentFile], newest: SegmentHeader) -> None:
        expected = 0
        for at in self.batches:
            if at.entry.position > expected:
                self.missing.append((expected, at.entry.position))
            expected = at.entry.position + 1
        if newest.first_position > expected:
            self.missing.append((expected, newest.first_position))
        for start, end in self.missing:
            which = "the oldest" if start == 0 else f"from number {start}"
            self.notes.append(f"{end - start} batches are missing, {which}: dropped for their size, or never recorded")
        for segment in segments:
            if segment.tail:
                self.notes.append(f"{segment.file.name}: {segment.tail}")
        if self.num_undone:
            self.notes.append(f"{self.num_undone} batches were undone by a rollback and are left out")


def _open(file: Path, key: tuple[int, int]) -> SegmentFile:
    """A segment with its index, where it has its end. Raises RolloutFileError where the header is none."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(len(MAGIC) + _U32)
        if not prefix.startswith(MAGIC) and not MAGIC.startswith(prefix):
            raise RolloutFileError(f"{file}: not a segment of a record (it does not begin with {MAGIC.decode()})")
        length = int.from_bytes(prefix[len(MAGIC) :], "little")
        if len(prefix) < len(MAGIC) + _U32 or length > size - len(prefix):
            raise RolloutFileError(f"{file}: its header is not whole: it is being written, or was cut off by a kill")
        body = stream.read(length)
        try:
            header = msgspec.msgpack.decode(body, type=SegmentHeader)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RolloutFileError(f"{file}: its header cannot be read: {one_line(str(error))}") from error
        if header.recording_version != SEGMENT_VERSION:
            raise RolloutFileError(
                f"{file}: recording_version: {header.recording_version}, a segment of a record has {SEGMENT_VERSION}"
            )
        if (header.epoch, header.number) != key:
            raise RolloutFileError(f"{file}: its header is of epoch {header.epoch}, number {header.number}: altered")
        segment = SegmentFile(file, header, stream.tell())
        _take_index(segment, stream)
    return segment


def _take_index(segment: SegmentFile, stream: BinaryIO) -> None:
    """Takes the batches from the index at the end of a closed segment; does nothing where there is none that fits."""
    last = _U32 + len(END)
    size = os.fstat(stream.fileno()).st_size
    if size < segment.offset + 3 * _U32 + last:
        return
    stream.seek(size - last)
    trailer = stream.read(last)
    start = size - last - int.from_bytes(trailer[:_U32], "little")
    if not trailer.endswith(END) or start < segment.offset + 3 * _U32:
        return
    stream.seek(start - _U32)
    crc, index = int.from_bytes(stream.read(_U32), "little"), stream.read(size - last - start)
    if zlib.crc32(index) != crc:
        return
    try:
        entries = list(decode_index(index))
    except ValueError:
        return
    known, end = len(segment.entries), segment.offset
    for entry in entries[known:]:
        if entry.offset != end + 2 * _U32 or entry.length <= 0:
            return
        end += 2 * _U32 + entry.length
    if entries[:known] == segment.entries and end + 3 * _U32 == start:
        segment.entries = entries
        segment.is_closed, segment.offset = True, size


def _extend(segment: SegmentFile) -> None:
    """Reads on, batch by batch, up to the last whole one."""
    segment.tail = ""
    with segment.file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        while size - segment.offset:
            stream.seek(segment.offset)
            prefix = stream.read(2 * _U32)
            length = int.from_bytes(prefix[:_U32], "little")
            if len(prefix) == 2 * _U32 and length == 0:
                _take_index(segment, stream)
                if segment.is_closed:
                    return
            if len(prefix) < 2 * _U32 or length == 0 or length > min(MAX_FRAME_BYTES, size - segment.offset - 8):
                break
            content = stream.read(length)
            if zlib.crc32(content) != int.from_bytes(prefix[_U32:], "little"):
                break
            try:
                head, _ = decode_head(content)
            except ValueError:
                break
            segment.entries.append(entry_of(head, segment.offset + 2 * _U32, length))
            segment.offset += 2 * _U32 + length
        if size > segment.offset:
            segment.tail = (
                f"{size - segment.offset:,} bytes after batch {len(segment.entries)} of the segment are no whole one: "
                "it is being written, or was cut off by a kill"
            )


@contextmanager
def _reading(batch: BatchAt) -> Iterator[BinaryIO]:
    """The segment of a batch; what goes wrong with it within is a RolloutFileError."""
    file = batch.segment.file
    try:
        with file.open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise RolloutFileError(f"{file}: dropped from the record meanwhile") from None
    except OSError as error:
        raise RolloutFileError(f"{file}: cannot be read: {error}") from error
    except ValueError as error:
        where = f"{file}: batch {batch.entry.position}"
        raise RolloutFileError(f"{where}: altered since it was written: {one_line(str(error))}") from error


def _part(stream: BinaryIO, batch: BatchAt, start: int, length: int) -> bytes:
    """Of a frame's content. Raises ValueError where it does not hold so much."""
    entry = batch.entry
    if start < 0 or length < 0 or start + length > entry.length:
        raise ValueError(f"{length:,} bytes from {start:,} on, its frame has {entry.length:,}")
    stream.seek(entry.offset + start)
    data = stream.read(length)
    if len(data) < length:
        raise ValueError(f"{length:,} bytes from {start:,} on, the file ends before")
    return data


def _head(batch: BatchAt, data: bytes) -> BatchHead:
    head, _ = decode_head(data)
    if entry_of(head, batch.entry.offset, batch.entry.length) != batch.entry:
        raise ValueError("the index says otherwise")
    return head
