"""The record's segment files: appended to, begun anew at a size, the oldest dropped beyond a bound."""

import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec
from penstock.schemas.config import RecordingConfig
from penstock.schemas.record import (
    BatchEntry,
    BatchHead,
    SegmentHeader,
    encode_end,
    encode_header,
    entry_of,
    segment_key,
    segment_name,
)

log = logging.getLogger(__name__)

_FRAME_PREFIX_BYTES = 8
_MB = 1_000_000


class SegmentFiles:
    """Appends batches to segments of one trainer. Each comes into the file whole or not at all.

    What a full disk holds up waits in memory, in order, until there is room: no checkpoint is committed meanwhile
    (`sync` fails), so that what waits here is also still on the stream.

    After a failed fsync nobody knows what of a file is on the disk, and the next fsync may well succeed without it. So
    a segment ends there, cut back to what was synced, and all behind that is written again into a new one.
    """

    def __init__(self, folder: Path, header: SegmentHeader, config: RecordingConfig) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._header = header
        self._segment_bytes = config.segment_mb * _MB
        self._max_mb = config.max_mb
        self._number = 0
        self._descriptor: int | None = None
        self._offset = self._synced_offset = 0
        self._entries: list[BatchEntry] = []
        self._unsynced: list[tuple[bytes, BatchHead]] = []
        """What is in the file since the last good fsync."""
        self._waiting: deque[tuple[bytes, BatchHead]] = deque()
        self._is_stuck = False
        self._try()  # the first segment says that a trainer has begun, and where, before it has a batch

    def append(self, frame: bytes, head: BatchHead) -> None:
        """`frame` and `head` are what `penstock.schemas.record.encode_batch` returns. A full disk is no error here."""
        self._waiting.append((frame, head))
        self._try()

    def sync(self) -> None:
        """Returns once everything appended is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        self._flush()
        if self._descriptor is not None:
            self._fsync()

    def close(self) -> None:
        """Ends the segment, as far as the disk lets it."""
        if self._waiting:
            self._try()
        if self._descriptor is None:
            return
        try:
            self._end()
        except OSError as error:
            log.warning("%s: not closed with its index: %s", self._file, error)
            if self._waiting:
                self._try()
            if self._descriptor is not None:
                self._leave()

    @property
    def _file(self) -> Path:
        return self._folder / segment_name(self._header.epoch, self._number)

    def _try(self) -> None:
        try:
            self._flush()
        except OSError as error:
            if not self._is_stuck:
                log.warning("%s cannot be written: %s; what is recorded waits for room", self._file, error)
            self._is_stuck = True
            return
        if self._is_stuck:
            log.info("%s is written again", self._file)
        self._is_stuck = False

    def _flush(self) -> None:
        if self._descriptor is None:
            self._begin()
        while self._waiting:
            frame, head = self._waiting[0]
            self._write(frame)
            self._entries.append(entry_of(head, self._offset + _FRAME_PREFIX_BYTES, len(frame) - _FRAME_PREFIX_BYTES))
            self._offset += len(frame)
            self._unsynced.append(self._waiting.popleft())
            if self._offset >= self._segment_bytes:
                self._end()
                self._begin()

    def _begin(self) -> None:
        self._drop_oldest()
        self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._offset, self._entries = 0, []
        try:
            header = encode_header(msgspec.structs.replace(self._header, number=self._number))
            self._write(header)
            self._offset = self._synced_offset = len(header)
            os.fsync(self._descriptor)
            _fsync_folder(self._folder)
        except OSError:
            os.close(self._descriptor)
            self._descriptor = None  # the next try writes the file from its first byte again
            raise

    def _end(self) -> None:
        """Raises OSError where the end cannot be written: the segment then has none."""
        self._write(encode_end(tuple(self._entries)))
        self._fsync()
        self._leave()

    def _leave(self) -> None:
        """Nothing more is written to this segment."""
        assert self._descriptor is not None
        descriptor, self._descriptor = self._descriptor, None
        self._number += 1
        os.close(descriptor)

    def _fsync(self) -> None:
        assert self._descriptor is not None
        try:
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):  # where it cannot be cut, a reader takes the later of two
                os.ftruncate(self._descriptor, self._synced_offset)
            self._waiting.extendleft(reversed(self._unsynced))
            self._unsynced = []
            self._leave()
            raise
        self._synced_offset, self._unsynced = self._offset, []

    def _write(self, data: bytes) -> None:
        """Appends all of `data`, or nothing."""
        assert self._descriptor is not None
        left = memoryview(data)
        os.lseek(self._descriptor, self._offset, os.SEEK_SET)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            os.ftruncate(self._descriptor, self._offset)
            raise

    def _drop_oldest(self) -> None:
        """Makes room for a whole segment. The one before it stays, whatever its size."""
        own = (self._header.epoch, self._number)  # begun before in vain, perhaps
        found = ((segment_key(file), file) for file in self._folder.iterdir())
        known = {key: file for key, file in found if key is not None and key != own}
        sizes = {key: file.stat().st_size for key, file in sorted(known.items())}
        while len(sizes) > 1 and sum(sizes.values()) + self._segment_bytes > self._max_mb * _MB:
            oldest = next(iter(sizes))
            known[oldest].unlink(missing_ok=True)
            del sizes[oldest]
            log.warning(
                "%s: dropped, the oldest of the record: recording.max_mb = %d is reached", known[oldest], self._max_mb
            )


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
