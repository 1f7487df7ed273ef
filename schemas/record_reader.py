"""Reads the record of rollouts: the batches on the surviving line, each group by itself, during the run too."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.schemas.record import (
    FOLDER,
    FORMAT,
    BatchHead,
    GroupEntry,
    RecordedGroup,
    RecordHeader,
    RecordReadError,
    decode_group_row,
    decode_head,
    file_key,
)
from penstock.schemas.rollout import one_line


class RecordFile(NamedTuple):
    path: Path
    header: RecordHeader


class BatchAt(NamedTuple):
    """A batch and the file that holds it; the numbers are those of its `penstock.schemas.record.BatchHead`."""

    file: RecordFile
    position: int
    update: int
    policy_version: int
    counts: bool


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

    batches: on the surviving line, in the order in which they were trained, without those that a rollback undid. They
        include those after the trainer's last checkpoint until the run is continued without them.
    missing: ranges (start, end), half-open, of positions absent from that line: dropped for their size, for example.
    undone: batches that a rollback undid.
    notes: warnings for a reader, one line each: missing batches, a file that cannot be read, undone batches.

    Raises:
        RecordReadError: the run has no record, or none of its files can be read.
    """

    def __init__(self, run_folder: Path) -> None:
        self.folder = run_folder / FOLDER
        self.files: list[RecordFile] = []
        """Every file, including those of undone batches, sorted by epoch and number."""
        self.batches: list[BatchAt] = []
        self.missing: list[tuple[int, int]] = []
        self.undone: list[BatchAt] = []
        self.notes: list[str] = []
        self.refresh()
        if not self.files:
            expected = "expected the folder of a run that has begun, without record = false in its run file"
            raise RecordReadError((self.notes or [f"{self.folder}: no record of rollouts; {expected}"])[0])

    @property
    def header(self) -> RecordHeader:
        """The newest file's."""
        return self.files[-1].header

    def refresh(self) -> None:
        """Reads the files again: adds new batches and leaves out those dropped or undone since."""
        self.files, written, problems = [], list[BatchAt](), list[str]()
        found = ((key, path) for path in self.folder.glob("*") if (key := file_key(path)) is not None)
        for _, path in sorted(found):
            try:
                file, batches = _read_file(path)
            except RecordReadError as error:
                if path.exists():  # the other files can be read
                    problems.append(str(error))
                continue
            self.files.append(file)
            written += batches
        self._follow_line(written)
        self.notes = problems + self._line_notes()

    def head(self, batch: BatchAt) -> BatchHead:
        """Reads the trainer's findings about a batch, and a summary of its groups.

        Raises:
            RecordReadError: the file was dropped or altered in the meantime.
        """
        with _reading(batch.file.path, batch.position) as connection:
            return _head(connection, batch)

    def group(self, at: GroupAt) -> RecordedGroup:
        """Reads one whole group. Raises RecordReadError as `head` does."""
        query = "SELECT payload, findings FROM contents WHERE position = ? AND place = ?"
        with _reading(at.batch.file.path, at.batch.position) as connection:
            (row,) = connection.execute(query, (at.batch.position, at.place))
            return decode_group_row(*row)

    def batch(self, batch: BatchAt) -> tuple[BatchHead, list[RecordedGroup]]:
        """Reads a batch with its groups in the order in which they were trained. Raises RecordReadError as `head`
        does."""
        query = "SELECT payload, findings FROM contents WHERE position = ? ORDER BY place"
        with _reading(batch.file.path, batch.position) as connection:
            head = _head(connection, batch)
            groups = [decode_group_row(*row) for row in connection.execute(query, (batch.position,))]
            if len(groups) != len(head.groups):
                raise ValueError(f"{len(groups)} groups, expected {len(head.groups)}")
            return head, groups

    def groups(self) -> Iterator[GroupAt]:
        """Yields every group on the surviving line, in the order in which they were trained, without reading
        rollouts."""
        for batch in self.batches:
            head = self.head(batch)
            yield from (GroupAt(batch, head, place) for place in range(len(head.groups)))

    def _follow_line(self, written: list[BatchAt]) -> None:
        """Splits the batches into those on the line to the newest file and those undone."""
        self.batches, self.undone, self.missing = [], [], []
        if not self.files:
            return
        newest = self.header
        start, spans = 0, dict[int, tuple[int, int | None]]()
        for epoch, end in sorted(newest.line.items()):
            spans[epoch] = (start, end)
            start = end
        spans[newest.epoch] = (start, None)
        surviving: dict[int, BatchAt] = {}
        for batch in written:
            first, last = spans.get(batch.file.header.epoch, (0, 0))
            if first <= batch.position and (last is None or batch.position < last):
                surviving[batch.position] = batch  # written twice if the first write failed halfway
            else:
                self.undone.append(batch)
        self.batches = [surviving[position] for position in sorted(surviving)]
        expected = 0
        for position in [*sorted(surviving), newest.first_position]:
            if position > expected:
                self.missing.append((expected, position))
            expected = max(expected, position + 1)

    def _line_notes(self) -> list[str]:
        notes = [
            f"{end - start} batches are missing, {'the oldest' if start == 0 else f'from number {start}'}: dropped for "
            "their size, or never recorded"
            for start, end in self.missing
        ]
        if self.undone:
            notes.append(f"{len(self.undone)} batches were undone by a rollback and are left out")
        return notes


@contextmanager
def _reading(path: Path, position: int | None = None) -> Iterator[sqlite3.Connection]:
    """Opens a record file read-only. Turns SQLite's errors and ValueErrors in the block into RecordReadErrors."""
    if not path.exists():
        raise RecordReadError(f"{path}: dropped from the record meanwhile")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
        where = "cannot be read" if position is None else f"batch {position}: altered since it was written"
        raise RecordReadError(f"{path}: {where}: {one_line(str(error))}") from error


def _read_file(path: Path) -> tuple[RecordFile, list[BatchAt]]:
    """Reads a file's header and the list of its batches. Raises RecordReadError if it cannot be read."""
    with _reading(path) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise ValueError(f"user_version {version}, expected {FORMAT}: no record of rollouts, or only just begun")
        ((header,),) = connection.execute("SELECT CAST(header AS BLOB) FROM trainer")
        file = RecordFile(path, msgspec.msgpack.decode(header, type=RecordHeader))
        rows = connection.execute("SELECT position, update_number, policy_version, counts FROM batches ORDER BY 1")
        numbers = msgspec.convert(rows.fetchall(), list[tuple[int, int, int, bool]], strict=False)
        return file, [BatchAt(file, *of_batch) for of_batch in numbers]


def _head(connection: sqlite3.Connection, batch: BatchAt) -> BatchHead:
    (row,) = connection.execute("SELECT * FROM batches WHERE position = ?", (batch.position,))
    groups = connection.execute("SELECT * FROM groups WHERE position = ? ORDER BY place", (batch.position,))
    head = decode_head(row, groups.fetchall())
    if (head.position, head.update, head.counts) != batch[1:3] + batch[4:]:
        raise ValueError("another batch stands in its place")
    return head
