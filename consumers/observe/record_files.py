"""The files of the record of rollouts: a new one is begun at a size, and the oldest is deleted beyond a total."""

import logging
import sqlite3
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.schemas.config import RECORD_FILE_MB
from penstock.schemas.record import FORMAT, SCHEMA, RecordHeader, Rows, file_key, file_name

log = logging.getLogger(__name__)

_MB = 1_000_000
_SUFFIXES = ("", "-wal", "-shm")


class RecordFiles:
    """Appends batches to the files of one trainer epoch, each in one transaction that ends with an fsync.

    If the disk is full, batches wait in memory, in order, until there is room. `sync` fails meanwhile, so no checkpoint
    is committed, and the groups that wait here stay on the stream too.

    After a failed write it is unknown how much of it is on the disk. The file ends there, and the batch is written
    again into a new one; a reader takes the later of two.
    """

    def __init__(self, folder: Path, header: RecordHeader, max_mb: int, file_mb: int = RECORD_FILE_MB) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._header = header
        self._file_bytes = file_mb * _MB
        self._max_mb = max_mb
        self._number = 0
        self._num_batches = 0
        """The batches in the open file."""
        self._connection: sqlite3.Connection | None = None
        self._waiting: deque[dict[str, Rows]] = deque()
        self._is_stuck = False
        self._try()  # the first file records where a trainer has begun before it has a batch

    def append(self, batch: dict[str, Rows]) -> None:
        """Appends the result of `penstock.schemas.record.encode_batch`. A full disk is no error here."""
        self._waiting.append(batch)
        self._try()

    def sync(self) -> None:
        """Returns once everything appended is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        self._flush()

    def close(self) -> None:
        """Writes batches that wait, if the disk has room, and closes the file."""
        if self._waiting:
            self._try()
        self._leave()

    @property
    def _file(self) -> Path:
        return self._folder / file_name(self._header.epoch, self._number)

    def _try(self) -> None:
        file = self._file
        try:
            self._flush()
        except OSError as error:
            if not self._is_stuck:
                log.warning("%s cannot be written: %s; what is recorded waits for room", file, error)
            self._is_stuck = True
            return
        if self._is_stuck:
            log.info("the record is written again, from %s on", self._file.name)
        self._is_stuck = False

    def _flush(self) -> None:
        try:
            if self._connection is None and self._number == 0:
                self._begin()
            while self._waiting:
                self._write(self._connection or self._begin(), self._waiting[0])
                self._waiting.popleft()
        except (sqlite3.ProgrammingError, sqlite3.DataError):  # not the disk: it would fail again
            raise
        except sqlite3.Error as error:
            self._leave()
            raise OSError(str(error)) from error

    def _begin(self) -> sqlite3.Connection:
        self._drop_oldest()
        _unlink(self._file)  # an attempt to begin it may have failed
        # Used by the recorder's thread and by the trainer's, one at a time.
        connection = sqlite3.connect(self._file, timeout=1.0, check_same_thread=False)
        self._connection, self._num_batches = connection, 0
        connection.executescript(
            f"PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; BEGIN; PRAGMA user_version = {FORMAT}; {SCHEMA}"
        )
        header = self._header
        connection.execute(
            "INSERT INTO trainer VALUES (?, ?, ?)", (header.run, header.epoch, msgspec.msgpack.encode(header))
        )
        connection.commit()
        return connection

    def _write(self, connection: sqlite3.Connection, batch: dict[str, Rows]) -> None:
        with connection:
            for table, rows in batch.items():
                for row in rows:
                    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)
        self._num_batches += 1
        size = connection.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size").fetchone()
        if size[0] >= self._file_bytes:
            self._leave()

    def _leave(self) -> None:
        """Closes the open file. One without a batch is begun again."""
        if self._connection is None:
            return
        connection, self._connection = self._connection, None
        self._number += self._num_batches > 0
        with suppress(sqlite3.Error):  # a reader is connected, or the disk is full: the WAL file stays
            connection.execute("PRAGMA journal_mode = DELETE")
        with suppress(sqlite3.Error):
            connection.close()

    def _drop_oldest(self) -> None:
        """Makes room for a whole file. The previous file stays, whatever its size."""
        found = sorted((key, path) for path in self._folder.iterdir() if (key := file_key(path)) is not None)
        sizes = {path: _size(path) for _, path in found if path != self._file}
        while len(sizes) > 1 and sum(sizes.values()) + self._file_bytes > self._max_mb * _MB:
            oldest = next(iter(sizes))
            _unlink(oldest)
            del sizes[oldest]
            log.warning("%s: dropped, the oldest of the record: recording.max_mb = %d is reached", oldest, self._max_mb)


def _size(file: Path) -> int:
    parts = (file.with_name(file.name + suffix) for suffix in _SUFFIXES)
    return sum(part.stat().st_size for part in parts if part.exists())


def _unlink(file: Path) -> None:
    for suffix in _SUFFIXES:
        file.with_name(file.name + suffix).unlink(missing_ok=True)
