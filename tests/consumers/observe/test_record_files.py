"""Files are begun anew at a size, the oldest are dropped beyond a bound; a full or failing disk loses nothing."""

import resource
import signal
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.schemas.record import FOLDER
from penstock.schemas.record_reader import Record
from recorded_batches import batch, rows, write_record

PADDING = 150_000
"""Four batches of two such groups fill a file of a megabyte: 0.3, 0.6, 0.9, 1.2."""
DOUBLES = Path(__file__).parents[2] / "doubles"


def files_of(run: Path) -> list[Path]:
    return sorted((run / FOLDER).iterdir())


def assert_each_once(run: Path, num_batches: int) -> None:
    record = Record(run)
    assert [at.position for at in record.batches] == list(range(num_batches))
    assert record.missing == record.notes == record.undone == []
    for at in record.batches:
        assert record.batch(at) == batch(at.position, padding=PADDING)


def test_files_are_closed_at_their_size_and_the_oldest_dropped_beyond_the_bound(tmp_path, caplog):
    write_record(tmp_path, range(20), padding=PADDING)
    assert [file.name for file in files_of(tmp_path)] == ["00000-000003.sqlite", "00000-000004.sqlite"]
    assert sum(file.stat().st_size for file in files_of(tmp_path)) < 2.6e6
    assert "00000-000000.sqlite: dropped, the oldest of the record: recording.max_mb = 2 is reached" in caplog.text
    record = Record(tmp_path)
    assert [at.position for at in record.batches] == list(range(12, 20))
    assert record.missing == [(0, 12)] and "12 batches are missing, the oldest" in record.notes[0]


def test_files_of_earlier_trainers_count_for_the_bound_and_undone_ones_go_first(tmp_path):
    write_record(tmp_path / "undone", range(5), padding=PADDING)
    write_record(tmp_path / "undone", range(9), epoch=1, padding=PADDING)
    assert [file.name[:5] for file in files_of(tmp_path / "undone")] == ["00001"] * 2
    for epoch in range(12):  # each ends before a file is full
        line = {earlier: 2 * (earlier + 1) for earlier in range(epoch)}
        write_record(tmp_path, range(2 * epoch, 2 * epoch + 2), epoch=epoch, line=line, padding=PADDING)
    assert [file.name[:5] for file in files_of(tmp_path)] == ["00010", "00011"]
    assert sum(file.stat().st_size for file in files_of(tmp_path)) < 2e6
    assert [at.position for at in Record(tmp_path).batches] == [20, 21, 22, 23]


@contextmanager
def full_disk(num_bytes: int):
    """No file of this process grows beyond `num_bytes`: the system's own refusal, wherever SQLite meets it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_a_full_disk_holds_up_is_written_in_order_once_there_is_room(tmp_path, caplog):
    files = write_record(tmp_path, range(1), close=False, padding=PADDING)
    with full_disk(200_000):
        for position in (1, 2):
            files.append(rows(position, padding=PADDING))
        for _ in range(3):
            with pytest.raises(OSError, match=r"disk I/O error|full"):
                files.sync()
        assert caplog.text.count("cannot be written") == 1
        assert [at.position for at in Record(tmp_path).batches] == [0], "no part of a batch is there"
    files.sync()
    files.append(rows(3, padding=PADDING))
    assert_each_once(tmp_path, 4)
    files.close()
    assert_each_once(tmp_path, 4)


def test_a_batch_that_does_not_fit_into_its_file_any_more_is_written_into_a_new_one(tmp_path):
    files = write_record(tmp_path, range(1), close=False, padding=PADDING)
    with full_disk(500_000):
        for position in (1, 2):
            files.append(rows(position, padding=PADDING))
        files.sync()
    files.close()
    assert_each_once(tmp_path, 3)


class FailingCommit(sqlite3.Connection):
    """Commits, and says that it has not: nobody knows what of it is on the disk."""

    num_left = 0

    def __exit__(self, *error: object) -> bool:
        super().__exit__(*error)
        if FailingCommit.num_left:
            FailingCommit.num_left -= 1
            raise sqlite3.OperationalError("disk I/O error")
        return False


def test_a_batch_that_a_failed_write_has_put_in_doubt_is_written_again_and_read_once(tmp_path, monkeypatch):
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **named: connect(*args, factory=FailingCommit, **named))
    files = write_record(tmp_path, range(1), close=False, padding=PADDING)
    FailingCommit.num_left = 2
    files.append(rows(1, padding=PADDING))
    with pytest.raises(OSError, match="disk I/O error"):
        files.sync()
    assert_each_once(tmp_path, 2)
    files.sync()
    files.append(rows(2, padding=PADDING))
    files.close()
    monkeypatch.undo()
    assert_each_once(tmp_path, 3)
    assert len(files_of(tmp_path)) == 2


def test_a_close_that_cannot_write_says_so_and_closes(tmp_path, caplog):
    files = write_record(tmp_path, range(1), close=False, padding=PADDING)
    with full_disk(100_000):
        files.append(rows(1, padding=PADDING))
        files.close()
        files.close()
    assert "cannot be written" in caplog.text
    assert_each_once(tmp_path, 1)


KILLED = """
import os, signal, sys, threading
sys.path.insert(0, {doubles!r})
from pathlib import Path
from recorded_batches import rows, write_record
files = write_record(Path({run!r}), range(2), close=False)
files.sync()
print("synced", flush=True)
for position in range(2, 10**6):
    files.append(rows(position, padding=20_000))
"""


def test_a_writer_killed_in_the_middle_leaves_whole_batches_and_all_that_it_had_synced(tmp_path):
    program = KILLED.format(doubles=str(DOUBLES), run=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"synced\n"
        reader = Record(tmp_path)
        while len(reader.batches) < 5:
            reader.refresh()
        process.send_signal(signal.SIGKILL)
    record = Record(tmp_path)
    assert record.notes == [] and [at.position for at in record.batches] == list(range(len(record.batches)))
    assert len(record.batches) >= 5
    for at in record.batches:
        assert record.batch(at) == batch(at.position, padding=20_000 if at.position > 1 else 0)
