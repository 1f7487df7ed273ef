"""A record as a Parquet file: every number of every sampled token, and whatever stands in the way named."""

import importlib.util

import msgspec
import pyarrow.parquet as pq
import pytest

from inspected_run import (
    DEAD,
    KNOWN,
    NAME,
    NUM_PLAIN,
    SKIPPED,
    TURNS,
    inspected_run,
    plain,
    settings,
    trainer_files,
    write_batch,
)
from penstock.deploy import cli
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.record.parquet import COLUMNS
from penstock.deploy.record.reading import load_record
from penstock.schemas.config import ConfigError
from penstock.schemas.record import SegmentFindings, group_entry, sampled_tokens
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import unpack_ids
from recorded_batches import dead_batch, rows
from wire_examples import PNG, image_group


def export(capsys, *argv: str) -> tuple[int, str]:
    status = cli.main(["record", "export", *argv])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_every_segment_is_a_row_with_the_numbers_of_its_tokens(tmp_path, capsys):
    inspected_run(tmp_path)
    file = tmp_path / "out.parquet"
    status, said = export(capsys, NAME, str(file), "--runs", str(tmp_path))
    table = pq.read_table(file).to_pylist()
    assert load_record(NAME, runs=tmp_path).equals(pq.read_table(file))
    assert status == 0 and f"{len(table)} rows" in said and not (tmp_path / "out.parquet.partial").exists()
    assert len(table) == 2 * NUM_PLAIN + 2 + 2 + 2 + 2 + 1
    record, n = Record(tmp_path / NAME), 0
    for at in record.groups():
        recorded = record.group(at)
        group = recorded.decode()
        for r, rollout in enumerate(group.rollouts):
            for s, segment in enumerate(rollout.segments):
                row, n = table[n], n + 1
                assert (row["index"], row["rollout"], row["segment"]) == (at.entry.index, r, s)
                assert (row["reward"], row["advantage"]) == (rollout.reward.value, at.entry.advantages[r])
                assert (row["outcome"], row["update"]) == (at.entry.outcome, at.head.update)
                assert dict(row["reward_parts"]) == rollout.reward.parts
                assert dict(row["metadata"]) == group.prompt.metadata
                assert row["token_ids"] == unpack_ids(segment.token_ids).tolist()
                tokens = sampled_tokens(segment, recorded.findings[r][s])
                columns = ("positions", "versions", "lags", "behavior_logprobs")
                assert list(zip(*(row[name] for name in columns), strict=True)) == [token[:4] for token in tokens]
                scores = ("proximal_logprobs", "importance_weights", "kept")
                if recorded.findings[r][s].kept:
                    assert list(zip(*(row[name] for name in scores), strict=True)) == [token[4:] for token in tokens]
                else:
                    assert [row[name] for name in scores] == [None] * 3
    assert n == len(table)
    by_index = {row["index"]: row for row in table}
    assert by_index[KNOWN]["prompt"] == "2+2=" and by_index[KNOWN]["finish_reason"] == "length"
    assert msgspec.json.decode(by_index[TURNS]["messages"])[0]["content"] == "ask"
    assert (by_index[SKIPPED]["outcome"], by_index[DEAD]["reason"]) == ("skipped", "poison: <b>x</b>")


def test_the_images_of_a_group_are_in_its_first_row(tmp_path):
    group = image_group()
    findings = tuple(tuple(SegmentFindings((-1,) * len(s.version_spans)) for s in r.segments) for r in group.rollouts)
    save_run_file(settings(tmp_path), tmp_path / NAME)
    files = trainer_files(tmp_path)
    write_batch(files, 0, [(group, findings, group_entry(group, findings, "trained", advantages=(0.5, -0.5)))])
    files.close()
    first, second = load_record(NAME, runs=tmp_path).to_pylist()
    (place,) = group.rollouts[0].segments[0].images
    assert first["images"] == second["images"] == [{"digest": place.digest, "start": 1, "end": 3}]
    assert first["image_files"] == [(place.digest, PNG)] and second["image_files"] is None


def test_a_record_of_nothing_has_its_columns_and_one_that_is_not_there_is_refused(tmp_path):
    trainer_files(tmp_path, 0, {}).close()
    assert load_record(tmp_path / NAME).schema == COLUMNS
    with pytest.raises(ConfigError, match="nothing: neither a folder nor a run in"):
        load_record("nothing", runs=tmp_path)


def test_what_died_unscored_has_no_reward_and_what_a_rollback_undid_is_not_exported_and_that_is_said(tmp_path, capsys):
    inspected_run(tmp_path)
    files = trainer_files(tmp_path, 1, {0: 10})
    write_batch(files, 10, [plain(201)])
    files.append(dead_batch(11))
    files.close()
    file = tmp_path / "out.parquet"
    status, said = export(capsys, str(tmp_path / NAME), str(file))
    assert status == 0 and "record: 1 batches were undone by a rollback" in said
    *_, other, _, first, last = pq.read_table(file).to_pylist()
    assert other["index"] == 201 and KNOWN not in pq.read_table(file)["index"].to_pylist()
    assert (first["index"], first["rollout"], last["rollout"]) == (301, 0, 1)
    assert (last["outcome"], last["reason"]) == ("dead", "reward: KeyError: 'x'")
    assert (last["reward"], last["advantage"]) == (None, None) and len(last["token_ids"]) == 6


def test_what_cannot_be_exported_is_named_and_leaves_no_file(tmp_path, capsys, monkeypatch):
    inspected_run(tmp_path, close=False).append(rows(11, padding=10))  # its payload breaks the contract
    file = tmp_path / "out.parquet"

    def refused(run: str, out: str) -> str:
        status, said = export(capsys, run, out, "--runs", str(tmp_path))
        assert status == 2 and said.count("\n") == 1, said
        return said

    assert "neither a folder nor a run" in refused("nothing", str(file))
    assert "out.csv: expected a file name that ends in .parquet" in refused(NAME, "out.csv")
    assert "cannot be written" in refused(NAME, str(tmp_path / "no" / "out.parquet"))
    assert "batch 11: " in refused(NAME, str(file))
    assert not list(tmp_path.glob("out.*"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pyarrow is not installed; expected the extra: pip install 'penstock[parquet]'" in refused(NAME, str(file))
