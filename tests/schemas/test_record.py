"""The record of rollouts: what was written is read back along the surviving line, and a cut is said, never guessed."""

import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock.schemas import record as schema
from penstock.schemas.config import ConfigError, load_config
from penstock.schemas.record import FOLDER, BatchEntry, decode_blob, encode_batch, encode_end, sampled_tokens
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout_file import RolloutFileError, read_rollout_file

from recorded_batches import batch, write_segments


def positions(record: Record) -> list[int]:
    return [at.entry.position for at in record.batches]


def only_segment(run: Path) -> Path:
    (file,) = (run / FOLDER).iterdir()
    return file


@pytest.mark.parametrize("close", [True, False], ids=["by its index", "by reading on"])
def test_batches_and_groups_come_back_as_they_were_written(tmp_path, close):
    write_segments(tmp_path, range(3), close=close)
    record = Record(tmp_path)
    assert positions(record) == [0, 1, 2] and record.notes == [] and record.missing == []
    for position, at in enumerate(record.batches):
        head, groups = batch(position)
        found, blobs = record.batch(at)
        assert blobs == groups
        assert found == record.head(at)
        assert found.metrics == head.metrics and found.update == position + 1
        assert [group.index for group in found.groups] == list(at.entry.indexes)
    groups = list(record.groups())
    assert [group.entry.index for group in groups] == [1, 2, 11, 12, 21, 22]
    assert record.group(groups[3]) == batch(1)[1][1]
    assert record.group(groups[3]).decode().index == 12
    assert [at.entry.index for at in record.find(21)] == [21] and record.find(99) == []


def test_a_token_has_every_number_that_was_recorded_and_none_where_nothing_was_scored(tmp_path):
    write_segments(tmp_path, range(1))
    record = Record(tmp_path)
    recorded = record.group(next(record.groups()))
    scored, skipped = (
        sampled_tokens(rollout.segments[0], findings[0])
        for rollout, findings in zip(recorded.decode().rollouts, recorded.findings, strict=True)
    )
    assert scored[1] == (4, 7, 1, -1.25, -1.0, 1.25, True)
    assert scored[2] == (5, 8, 0, -0.0625, -0.125, 0.0, False)
    assert skipped[3] == (8, 8, 0, -0.125, None, None, None) and len(skipped) == 4


def test_a_run_without_a_record_is_refused(tmp_path):
    with pytest.raises(RolloutFileError, match=r"record: no record of rollouts; expected .* record = true"):
        Record(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_cut_of_a_segment_leaves_its_first_batches(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    write_segments(run, range(4), close=data.draw(st.booleans(), label="closed"))
    ends = [0]
    for at in Record(run).batches:
        ends.append(at.entry.offset + at.entry.length)
    file = only_segment(run)
    whole = file.read_bytes()
    first = Record(run).batches[0].entry.offset - 8
    cut = data.draw(st.integers(first, len(whole) - 1), label="cut")
    file.write_bytes(whole[:cut])
    record = Record(run)
    assert positions(record) == list(range(sum(end <= cut for end in ends[1:])))
    is_torn = cut not in (first, *ends)
    assert bool(record.notes) == is_torn
    if is_torn:
        assert f"after batch {len(record.batches)} of the segment are no whole one" in record.notes[0]
    for at in record.batches:
        assert record.batch(at)[1] == batch(at.entry.position)[1]


def test_a_bound_that_holds_no_two_segments_is_refused(tmp_path):
    (tmp_path / "run.toml").write_text('name = "r"\nmodel.path = "m"\nenvironment.path = "a:B"\nrecord = true\n')
    assert load_config(tmp_path / "run.toml").record
    with pytest.raises(ConfigError, match=r"recording.max_mb = 100: expected at least twice .*segment_mb = 64"):
        load_config(tmp_path / "run.toml", ["recording.max_mb=100"])


@pytest.mark.parametrize("size", [0, 5, 12, 40])
def test_a_segment_cut_within_its_header_holds_nothing(tmp_path, size):
    write_segments(tmp_path, range(2), epoch=0)
    write_segments(tmp_path, range(2, 3), epoch=1, line={0: 2})
    newest = max((tmp_path / FOLDER).iterdir())
    newest.write_bytes(newest.read_bytes()[:size])
    assert positions(Record(tmp_path)) == [0, 1]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_altered_byte_of_an_open_segment_ends_it_there(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    write_segments(run, range(4), close=False)
    before = Record(run).batches
    file = only_segment(run)
    whole = bytearray(file.read_bytes())
    place = data.draw(st.integers(before[0].entry.offset - 4, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(whole)
    record = Record(run)
    assert positions(record) == list(range(len(record.batches)))
    altered = next(n for n, at in enumerate(before) if place < at.entry.offset + at.entry.length)
    assert len(record.batches) == altered and record.notes


def test_an_altered_byte_of_a_closed_segment_is_found_when_it_is_read(tmp_path):
    write_segments(tmp_path, range(2))
    at = Record(tmp_path).batches[1]
    file = only_segment(tmp_path)
    whole = bytearray(file.read_bytes())
    whole[at.entry.offset + at.entry.length - 9] ^= 1
    file.write_bytes(whole)
    record = Record(tmp_path)
    with pytest.raises(RolloutFileError, match="batch 1: altered since it was written"):
        record.batch(record.batches[1])
    with pytest.raises(RolloutFileError, match="batch 1: altered"):
        record.group(list(record.groups())[3])


def test_what_a_rollback_undid_is_left_out_and_what_was_done_again_is_there_once(tmp_path):
    write_segments(tmp_path, range(7), epoch=0, close=False)
    write_segments(tmp_path, range(4, 9), epoch=1, line={0: 4})
    write_segments(tmp_path, range(6, 8), epoch=3, line={0: 4, 1: 6})
    record = Record(tmp_path)
    assert positions(record) == list(range(8))
    assert [at.segment.header.epoch for at in record.batches] == [0] * 4 + [1] * 2 + [3] * 2
    assert record.num_undone == 3 + 3 and "6 batches were undone by a rollback" in record.notes[-1]


def test_an_epoch_whose_successor_began_anew_is_undone_wholly(tmp_path):
    write_segments(tmp_path, range(3), epoch=0)
    write_segments(tmp_path, range(0), epoch=1, line={})
    record = Record(tmp_path)
    assert record.batches == [] and record.num_undone == 3


def test_batches_that_are_not_there_are_named(tmp_path):
    write_segments(tmp_path, range(2, 5), epoch=0)
    write_segments(tmp_path, range(6, 7), epoch=1, line={0: 6})
    record = Record(tmp_path)
    assert record.missing == [(0, 2), (5, 6)]
    assert record.notes[0].startswith("2 batches are missing, the oldest")
    assert record.notes[1].startswith("1 batches are missing, from number 5")


def test_a_record_that_is_being_written_is_followed(tmp_path):
    files = write_segments(tmp_path, range(2), close=False)
    record = Record(tmp_path)
    files.append(*encode_batch(*batch(2)))
    assert positions(record) == [0, 1]
    record.refresh()
    assert positions(record) == [0, 1, 2]
    files.close()
    record.refresh()
    assert positions(record) == [0, 1, 2] and record.segments[0].is_closed
    write_segments(tmp_path, range(1, 2), epoch=1, line={0: 1})
    record.refresh()
    assert positions(record) == [0, 1] and record.num_undone == 2


def test_a_segment_dropped_while_it_is_looked_at_is_said(tmp_path):
    write_segments(tmp_path, range(2))
    record = Record(tmp_path)
    only_segment(tmp_path).unlink()
    with pytest.raises(RolloutFileError, match="dropped from the record meanwhile"):
        record.head(record.batches[0])
    record.refresh()
    assert record.batches == []


def test_a_segment_is_not_taken_for_a_recording_nor_the_other_way_round(tmp_path):
    write_segments(tmp_path, range(1))
    with pytest.raises(RolloutFileError, match="a segment of the complete record of run 'run-1'"):
        read_rollout_file(only_segment(tmp_path))
    only_segment(tmp_path).write_bytes(b"name = 'demo'\n")
    with pytest.raises(RolloutFileError, match="not a segment of a record"):
        Record(tmp_path)


def read_all(record: Record) -> int:
    """Reads whatever can be, in every way; returns how many batches could not be. Of the others each byte is right."""
    num_refused = 0
    for at in record.batches:
        try:
            head, groups = record.batch(at)
            assert groups == batch(at.entry.position)[1]
            assert record.head(at) == head
            assert [record.group(found) for found in record.find(head.groups[1].index)] == groups[1:]
        except RolloutFileError:
            num_refused += 1
    return num_refused


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_becomes_of_a_records_bytes_is_said_and_never_a_traceback(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    files = write_segments(run, range(2), close=False)
    files._end()
    for position in (2, 3):
        files.append(*encode_batch(*batch(position)))
    if data.draw(st.booleans(), label="closed"):
        files.close()
    else:
        files.sync()
    file = data.draw(st.sampled_from(sorted((run / FOLDER).iterdir())))
    whole = bytearray(file.read_bytes())
    before = Record(run) if data.draw(st.booleans(), label="read before") else None
    cut = data.draw(st.none() | st.integers(0, len(whole) - 1), label="cut")
    places = data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=cut is None, max_size=4), label="places")
    values = [data.draw(st.integers(0, 255)) for _ in places]
    for place, value in zip(places, values, strict=True):
        whole[place] = value
    file.write_bytes(whole[:cut])
    if before is not None:
        read_all(before)
        before.refresh()
        read_all(before)
    record = Record(run)  # the other segment can be read
    num_refused = read_all(record)
    positions_read = positions(record)
    if cut is None and positions_read != [0, 1, 2, 3]:
        assert record.notes
    assert len(positions_read) - num_refused >= 2, "those of the other segment"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_index_that_is_whole_and_wrong_is_not_followed(tmp_path_factory, data):
    run = tmp_path_factory.mktemp("run")
    write_segments(run, range(2))
    record = Record(run)
    file = only_segment(run)
    body = file.read_bytes()[: record.batches[-1].entry.offset + record.batches[-1].entry.length]
    right = [at.entry for at in record.batches]
    number = st.sampled_from([*range(-2, 3), 2**31, 2**63 - 1, *(e.offset for e in right), *(e.length for e in right)])
    entry = st.builds(BatchEntry, number, number, number, number, number, st.tuples(number))
    wrong = data.draw(
        st.lists(entry, max_size=3).map(tuple)
        | st.sampled_from(["text", 7, [], [[]], {"a": 1}, [[1, 2, 3, 4, 5, 6]]])
        | st.tuples(st.just(right[0]), entry)
    )
    file.write_bytes(body + encode_end(wrong))
    record = Record(run)
    assert positions(record) == [0, 1] and read_all(record) == 0
    assert "after batch 2 of the segment are no whole one" in record.notes[0]


def test_an_index_with_another_number_for_a_batch_is_found_when_it_is_read(tmp_path):
    write_segments(tmp_path, range(2))
    record = Record(tmp_path)
    first, second = (at.entry for at in record.batches)
    body = only_segment(tmp_path).read_bytes()[: second.offset + second.length]
    wrong = msgspec.structs.replace(second, indexes=(11, 99))
    only_segment(tmp_path).write_bytes(body + encode_end((first, wrong)))
    record = Record(tmp_path)
    with pytest.raises(RolloutFileError, match="batch 1: altered since it was written: the index says otherwise"):
        record.find(99)


def test_a_segment_filled_with_zeros_does_not_hide_the_others(tmp_path):
    write_segments(tmp_path, range(2), epoch=0)
    write_segments(tmp_path, range(2, 4), epoch=1, line={0: 2})
    newest = max((tmp_path / FOLDER).iterdir())
    newest.write_bytes(bytes(newest.stat().st_size))
    record = Record(tmp_path)
    assert positions(record) == [0, 1] and read_all(record) == 0
    assert "00001-000000.segment: not a segment of a record" in record.notes[0]


def test_a_segment_cut_after_its_index_was_read_is_said(tmp_path):
    write_segments(tmp_path, range(3))
    record = Record(tmp_path)
    last = record.batches[-1]
    file = only_segment(tmp_path)
    for size in (last.entry.offset + 2, last.entry.offset + 40, last.entry.offset):
        file.write_bytes(file.read_bytes()[:size])
        for read in (record.head, record.batch):
            with pytest.raises(RolloutFileError, match=r"batch 2: altered since .* the file ends before"):
                read(last)
    record.refresh()
    assert positions(record) == [0, 1]


def test_what_unpacks_to_more_than_the_bound_is_refused_without_unpacking_it(monkeypatch):
    monkeypatch.setattr(schema, "MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(ValueError, match="more than 10,000 bytes unpacked"):
        decode_blob(zlib.compress(bytes(10_001)))
    head, groups = batch(0, padding=10_000)
    with pytest.raises(ValueError, match=r"RecordedGroup: .* bytes, expected at most 10,000"):
        encode_batch(head, groups)


def test_a_batch_larger_than_a_reader_takes_is_not_encoded(monkeypatch):
    monkeypatch.setattr(schema, "MAX_FRAME_BYTES", 2_000)
    with pytest.raises(ValueError, match=r"batch 3: .* bytes packed, expected at most 2,000"):
        encode_batch(*batch(3, padding=2_000))
