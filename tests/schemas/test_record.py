"""The record of rollouts: what was written is read back along the surviving line, and what cannot be read is named."""

import math
import shutil
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.schemas import record as schema
from penstock.schemas.config import ConfigError, load_config
from penstock.schemas.record import FOLDER, RecordReadError, decode_group_row, encode_batch, sampled_tokens
from penstock.schemas.record_reader import GroupAt, Record
from penstock.schemas.rollout import decode_group
from recorded_batches import batch, rows, write_record


def positions(record: Record) -> list[int]:
    return [at.position for at in record.batches]


def files_of(run: Path) -> list[Path]:
    return sorted((run / FOLDER).glob("*.sqlite"))


def only_file(run: Path) -> Path:
    (file,) = files_of(run)
    return file


@pytest.mark.parametrize("close", [True, False], ids=["closed", "being written"])
def test_batches_and_groups_come_back_as_they_were_written(tmp_path, close):
    files = write_record(tmp_path, range(3), close=close)
    record = Record(tmp_path)
    assert positions(record) == [0, 1, 2] and record.notes == [] and record.missing == []
    for position, at in enumerate(record.batches):
        assert record.batch(at) == batch(position)
        assert record.head(at) == batch(position)[0]
        assert at[1:] == (position, position + 1, position, True)
    groups = list(record.groups())
    assert [group.entry.index for group in groups] == [1, 2, 11, 12, 21, 22]
    assert record.group(groups[3]) == batch(1)[1][1]
    assert record.group(groups[3]).decode().index == 12
    files.close()


def test_numbers_that_are_not_finite_come_back_as_nan_and_all_others_bit_for_bit(tmp_path):
    metrics = {"loss": 0.1 + 0.2, "tiny": 5e-324, "large": 1.7976931348623157e308, "third": -1 / 3}
    head, groups = batch(0)
    entry = msgspec.structs.replace(head.groups[0], advantages=(math.nan, math.inf), max_weight=1 / 3)
    head = msgspec.structs.replace(
        head, metrics={**metrics, "none": math.nan, "more": math.inf}, groups=(entry,), lag_histogram={0: 3, 12: 4}
    )
    files = write_record(tmp_path, range(0), close=False)
    files.append(encode_batch(head, groups[:1]))
    files.close()
    record = Record(tmp_path)
    found = record.head(record.batches[0])
    assert {name: found.metrics[name] for name in metrics} == metrics
    assert math.isnan(found.metrics["none"]) and math.isnan(found.metrics["more"])
    assert found.lag_histogram == {0: 3, 12: 4} and found.groups[0].max_weight == 1 / 3
    assert all(map(math.isnan, found.groups[0].advantages))


def test_any_tool_that_opens_sqlite_can_query_groups_rollouts_and_metrics(tmp_path):
    write_record(tmp_path, range(3))
    with closing(sqlite3.connect(only_file(tmp_path))) as connection:
        query = (
            "SELECT group_index, outcome, update_number FROM groups JOIN batches USING (position) WHERE position = 1"
        )
        assert connection.execute(query).fetchall() == [(11, "trained", 2), (12, "trained", 2)]
        query = (
            "SELECT group_index, sibling, advantage, finish_reason, num_sampled_tokens FROM rollouts WHERE reward < 1"
        )
        assert connection.execute(query).fetchall()[2:4] == [(11, 1, -0.5, "length", 4), (12, 1, -0.5, "length", 4)]
        query = "SELECT update_number, value FROM metrics WHERE name = 'loss'"
        assert connection.execute(query).fetchall() == [(1, 0.0), (2, 0.5), (3, 1.0)]
        (payload,) = connection.execute("SELECT payload FROM contents WHERE position = 2 AND place = 0").fetchone()
    assert decode_group(zlib.decompress(payload)).index == 21


def test_a_token_has_every_number_that_was_recorded_and_none_where_nothing_was_scored(tmp_path):
    write_record(tmp_path, range(1))
    record = Record(tmp_path)
    recorded = record.group(next(record.groups()))
    scored, skipped = (
        sampled_tokens(rollout.segments[0], findings[0])
        for rollout, findings in zip(recorded.decode().rollouts, recorded.findings, strict=True)
    )
    assert scored[1] == (4, 7, 1, -1.25, -1.0, 1.25, True)
    assert scored[2] == (5, 8, 0, -0.0625, -0.125, 0.0, False)
    assert skipped[3] == (8, 8, 0, -0.125, None, None, None) and len(skipped) == 4


def test_a_run_without_a_record_and_a_bound_that_holds_no_two_files_are_refused(tmp_path):
    with pytest.raises(RecordReadError, match=r"record: no record of rollouts; expected the folder of a run that"):
        Record(tmp_path)
    (tmp_path / "run.toml").write_text('name = "r"\nmodel.path = "m"\nenvironment.path = "a:B"\n')
    assert load_config(tmp_path / "run.toml").record
    with pytest.raises(ConfigError, match=r"recording.max_mb = 100: expected at least two .* 128"):
        load_config(tmp_path / "run.toml", ["recording.max_mb=100"])


def test_what_a_rollback_undid_is_left_out_and_what_was_done_again_is_there_once(tmp_path):
    write_record(tmp_path, range(7), epoch=0, close=False)
    write_record(tmp_path, range(4, 9), epoch=1, line={0: 4})
    write_record(tmp_path, range(6, 8), epoch=3, line={0: 4, 1: 6})
    record = Record(tmp_path)
    assert positions(record) == list(range(8))
    assert [at.file.header.epoch for at in record.batches] == [0] * 4 + [1] * 2 + [3] * 2
    assert len(record.undone) == 3 + 3 and "6 batches were undone by a rollback" in record.notes[-1]


def test_batches_that_are_not_there_are_named(tmp_path):
    write_record(tmp_path, range(2, 5), epoch=0)
    write_record(tmp_path, range(6, 7), epoch=1, line={0: 6})
    record = Record(tmp_path)
    assert record.missing == [(0, 2), (5, 6)]
    assert record.notes[0].startswith("2 batches are missing, the oldest")
    assert record.notes[1].startswith("1 batches are missing, from number 5")


def test_a_record_that_is_being_written_is_followed(tmp_path):
    files = write_record(tmp_path, range(2), close=False)
    record = Record(tmp_path)
    files.append(rows(2))
    assert positions(record) == [0, 1]
    record.refresh()
    assert positions(record) == [0, 1, 2]
    files.close()
    record.refresh()
    assert positions(record) == [0, 1, 2] and record.batch(record.batches[2]) == batch(2)
    write_record(tmp_path, range(1, 2), epoch=1, line={0: 1})
    record.refresh()
    assert positions(record) == [0, 1] and len(record.undone) == 2


def test_a_closed_record_is_read_where_nothing_can_be_written(tmp_path):
    write_record(tmp_path, range(2))
    (tmp_path / FOLDER).chmod(0o500)
    try:
        record = Record(tmp_path)
        assert [record.batch(at) for at in record.batches] == [batch(0), batch(1)]
    finally:
        (tmp_path / FOLDER).chmod(0o700)
    assert [file.suffix for file in (tmp_path / FOLDER).iterdir()] == [".sqlite"], "one file, without a WAL beside it"


def test_a_file_that_cannot_be_read_is_said_and_hides_no_other(tmp_path):
    write_record(tmp_path, range(2), epoch=0)
    write_record(tmp_path, range(2, 4), epoch=1, line={0: 2})
    for content, said in [
        (b"", "user_version 0, expected 2"),  # just begun
        (b"name = 'demo'\n" * 100, "file is not a database"),
        (bytes(50_000), "file is not a database"),  # zeros, after a power loss
    ]:
        files_of(tmp_path)[1].write_bytes(content)
        record = Record(tmp_path)
        assert [record.batch(at) for at in record.batches] == [batch(0), batch(1)]
        assert f"00001-000000.sqlite: cannot be read: {said}" in record.notes[0]
    files_of(tmp_path)[0].unlink()
    with pytest.raises(RecordReadError, match=said):
        Record(tmp_path)
    write_record(tmp_path, range(1))
    with closing(sqlite3.connect(files_of(tmp_path)[0])) as connection:
        connection.execute("PRAGMA user_version = 3")
    with pytest.raises(RecordReadError, match="user_version 3, expected 2"):
        Record(tmp_path)


ALTERATIONS = {
    "a group's bytes": "UPDATE contents SET payload = CAST(substr(payload, 1, 40) AS BLOB) || x'00' || "
    "substr(payload, 42) WHERE position = 1",
    "findings that are gone": "UPDATE contents SET findings = NULL WHERE position = 1",
    "a group that is gone": "DELETE FROM contents WHERE position = 1 AND place = 1",
    "an outcome that is none": "UPDATE groups SET outcome = 'x' WHERE position = 1",
    "metrics that are none": "UPDATE batches SET metrics = '{' WHERE position = 1",
    "text for a number": "UPDATE batches SET time_s = 'noon' WHERE position = 1",
    "the batch": "DELETE FROM batches WHERE position = 1",
}


def test_a_batch_that_was_altered_is_named_when_it_is_read(tmp_path):
    for n, (name, alteration) in enumerate(ALTERATIONS.items()):
        run = tmp_path / str(n)
        write_record(run, range(3))
        record = Record(run)
        with closing(sqlite3.connect(only_file(run))) as connection:
            connection.execute(alteration)
            connection.commit()
        with pytest.raises(RecordReadError, match=r"00000-000000.sqlite: batch 1: altered since it was written: "):
            pytest.fail(f"{name} is not noticed: {record.batch(record.batches[1])}")
        assert record.batch(record.batches[2]) == batch(2)


def read_all(record: Record) -> None:
    """Reads whatever can be read, in every way; what is read is what was written."""
    for at in record.batches:
        try:
            _, groups = record.batch(at)
            assert groups == batch(at.position)[1]
            assert record.group(GroupAt(at, record.head(at), 0)) == groups[0]
        except RecordReadError:
            continue


@pytest.fixture(scope="module", params=["closed", "being written"])
def two_files(request, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("run")
    write_record(run, range(2), epoch=0)
    files = write_record(run, range(2, 4), epoch=1, line={0: 2}, close=request.param == "closed")
    yield run
    files.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_becomes_of_a_records_bytes_is_said_and_never_a_traceback(two_files, tmp_path_factory, data):
    run = tmp_path_factory.mktemp("altered")
    shutil.copytree(two_files, run, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*-shm"))
    file = data.draw(st.sampled_from(sorted((run / FOLDER).glob("00001-*"))))
    whole = bytearray(file.read_bytes())
    before = Record(run) if data.draw(st.booleans(), label="read before") else None
    cut = data.draw(st.none() | st.integers(0, len(whole) - 1), label="cut")
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=30), label="places"):
        whole[place] = data.draw(st.integers(0, 255))
    file.write_bytes(whole[:cut])
    if before is not None:
        read_all(before)
        before.refresh()
        read_all(before)
    record = Record(run)  # the other file can be read
    assert positions(record)[:2] == [0, 1]
    read_all(record)


def test_what_unpacks_to_more_than_the_bound_is_refused_without_unpacking_it(monkeypatch):
    monkeypatch.setattr(schema, "MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(ValueError, match="more than 10,000 bytes unpacked"):
        decode_group_row(zlib.compress(bytes(10_001)), b"")
    with pytest.raises(ValueError, match=r"a group of .* bytes, expected at most 10,000"):
        encode_batch(*batch(0, padding=10_000))
