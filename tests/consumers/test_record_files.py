"""Segments are begun anew at a size, the oldest are dropped beyond a bound, and a full disk loses nothing."""

import errno
import os

import pytest
from recorded_batches import batch, write_segments

from schemas.record import FOLDER, encode_batch
from schemas.record_reader import Record

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
