"""Segments are begun anew at a size, the oldest are dropped beyond a bound; a full or failing disk loses nothing."""

import errno
import os

import pytest
from penstock.schemas.record import FOLDER, encode_batch
from penstock.schemas.record_reader import Record

from recorded_batches import batch, write_segments

PADDING = 150_000
"""Three batches of two such groups are in a segment of a megabyte that has reached its size: 0.3, 0.6, 0.9, 1.2."""


def test_segments_are_closed_at_their_size_and_the_oldest_dropped_beyond_the_bound(tmp_path, caplog):
    write_segments(tmp_path, range(20), padding=PADDING)
    files = sorted((tmp_path / FOLDER).iterdir())
    assert [file.name for file in files] == ["00000-000004.segment", "00000-000005.segment"]
    assert sum(file.stat().st_size for file in files) < 2.5e6
    assert "00000-000000.segment: dropped, the oldest of the record: recording.max_mb = 2 is reached" in caplog.text
    record = Record(tmp_path)
    assert [at.entry.position for at in record.batches] == [16, 17, 18, 19]
    assert record.missing == [(0, 16)] and "16 batches are missing, the oldest" in record.notes[0]
    assert all(segment.is_closed for segment in record.segments)


def test_undone_segments_of_earlier_trainers_count_for_the_bound_and_go_first(tmp_path):
    write_segments(tmp_path, range(5), padding=PADDING)
    write_segments(tmp_path, range(9), epoch=1, padding=PADDING)
    assert [file.name[:5] for file in sorted((tmp_path / FOLDER).iterdir())] == ["00001"] * 2


def test_trainers_that_end_before_a_segment_is_full_leave_no_more_than_the_bound(tmp_path):
    for epoch in range(12):
        line = {earlier: 2 * (earlier + 1) for earlier in range(epoch)}
        write_segments(tmp_path, range(2 * epoch, 2 * epoch + 2), epoch=epoch, line=line, padding=PADDING)
    files = sorted((tmp_path / FOLDER).iterdir())
    assert [file.name[:5] for file in files] == ["00010", "00011"]
    assert sum(file.stat().st_size for file in files) < 2e6
    assert [at.entry.position for at in Record(tmp_path).batches] == [20, 21, 22, 23]


def test_what_a_full_disk_holds_up_is_written_in_order_once_there_is_room(tmp_path, monkeypatch, caplog):
    files = write_segments(tmp_path, range(2), close=False)
    write = os.write
    room = [100]

    def write_as_far_as_there_is_room(descriptor, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, bytes(data[: room[0]]))
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_as_far_as_there_is_room)
        for position in (2, 3):
            files.append(*encode_batch(*batch(position)))
        with pytest.raises(OSError, match="No space left"):
            files.sync()
        assert caplog.text.count("cannot be written") == 1
        record = Record(tmp_path)
        assert len(record.batches) == 2 and record.notes == [], "no part of a batch is left in the file"
    files.sync()
    record.refresh()
    assert [at.entry.position for at in record.batches] == [0, 1, 2, 3]


def test_a_disk_that_is_full_from_the_start_costs_the_record_nothing_once_it_has_room(tmp_path, monkeypatch):
    def refuse(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        files = write_segments(tmp_path, range(1), close=False)
    files.append(*encode_batch(*batch(1)))
    assert [at.entry.position for at in Record(tmp_path).batches] == [0, 1]


class FailingDisk:
    """fsync fails at the given calls of it, from 0, and the disk keeps what it likes of the file: here nothing."""

    def __init__(self, monkeypatch, *fatal: int) -> None:
        self._fsync, self._left, self.num_calls = os.fsync, set(fatal), 0
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self.num_calls += 1
        if self.num_calls - 1 in self._left:
            raise OSError(errno.EIO, "Input/output error")
        self._fsync(descriptor)


def assert_each_once(run_folder, num_batches: int) -> None:
    record = Record(run_folder)
    assert [at.entry.position for at in record.batches] == list(range(num_batches))
    assert record.missing == record.notes == [] and record.num_undone == 0
    for at in record.batches:
        assert record.batch(at)[1] == batch(at.entry.position, padding=PADDING)[1]
    assert sum(len(segment.entries) for segment in record.segments) == num_batches, "none is in two files"


def test_what_a_failed_fsync_has_put_in_doubt_is_written_again_before_the_next_one_succeeds(tmp_path, monkeypatch):
    files = write_segments(tmp_path, range(1), close=False, padding=PADDING)
    files.sync()
    files.append(*encode_batch(*batch(1, padding=PADDING)))
    with monkeypatch.context() as patch:
        FailingDisk(patch, 0)
        with pytest.raises(OSError, match="Input/output"):
            files.sync()
        files.sync()
    first, second = sorted((tmp_path / FOLDER).iterdir())
    assert second.read_bytes().endswith(encode_batch(*batch(1, padding=PADDING))[0]), "in a file of its own"
    assert encode_batch(*batch(1, padding=PADDING))[0] not in first.read_bytes()
    files.append(*encode_batch(*batch(2, padding=PADDING)))
    assert_each_once(tmp_path, 3)
    files.close()
    assert_each_once(tmp_path, 3)


def test_an_end_that_cannot_be_synced_is_not_written_behind(tmp_path, monkeypatch):
    files = write_segments(tmp_path, range(2), close=False, padding=PADDING)
    files.sync()
    files.append(*encode_batch(*batch(2, padding=PADDING)))
    live = Record(tmp_path)
    with monkeypatch.context() as patch:
        disk = FailingDisk(patch, 0)
        files.append(*encode_batch(*batch(3, padding=PADDING)))  # fills the segment
        assert disk.num_calls == 1
        files.sync()
    files.append(*encode_batch(*batch(4, padding=PADDING)))
    files.sync()
    assert_each_once(tmp_path, 5)
    live.refresh()
    assert [live.head(at).position for at in live.batches] == [0, 1, 2, 3, 4], "who has read it before reads it anew"
    files.close()
    assert_each_once(tmp_path, 5)


def test_a_close_whose_fsync_fails_writes_what_is_in_doubt_once_more(tmp_path, monkeypatch, caplog):
    files = write_segments(tmp_path, range(2), close=False, padding=PADDING)
    with monkeypatch.context() as patch:
        FailingDisk(patch, 0)
        files.close()
    assert "not closed with its index: [Errno 5]" in caplog.text
    assert_each_once(tmp_path, 2)
    before = sorted(file.read_bytes() for file in (tmp_path / FOLDER).iterdir())
    files.close()
    assert sorted(file.read_bytes() for file in (tmp_path / FOLDER).iterdir()) == before, "closed again it is the same"


def test_what_could_not_even_be_cut_back_is_read_once(tmp_path, monkeypatch):
    files = write_segments(tmp_path, range(2), close=False, padding=PADDING)

    def refuse(descriptor, size):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        FailingDisk(patch, 0)
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="Input/output"):
            files.sync()
    files.sync()
    record = Record(tmp_path)
    assert [at.entry.position for at in record.batches] == [0, 1] and record.num_undone == 0
    assert [at.segment.header.number for at in record.batches] == [1, 1]
