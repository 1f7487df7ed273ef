"""A rollout file comes back as it was written, or is refused with the place where it breaks."""

import re
from pathlib import Path

import msgspec
import pytest

import wire_examples
from penstock.deploy.parity.rollout_file import (
    FORMAT,
    MAGIC,
    RolloutFileError,
    RolloutFileHeader,
    is_rollout_file,
    read_rollout_file,
    write_rollout_file,
)
from penstock.schemas.rollout import RecordError

HEADER = RolloutFileHeader(
    run="run-1",
    model="models/demo",
    model_digest="d" * 32,
    dtype="bfloat16",
    weights="rollouts.weights",
    policy_version=1_000_000_003,
    forks={1: 7},
    announced={0: 9},
)
GROUPS = tuple(wire_examples.group(index) for index in (3, 1, 2))


@pytest.fixture
def rollout_file(tmp_path: Path) -> Path:
    file = tmp_path / "rollouts"
    assert write_rollout_file(file, HEADER, GROUPS) == len(GROUPS)
    return file


def test_header_and_groups_survive_the_round_trip_in_their_order(rollout_file, tmp_path):
    assert read_rollout_file(rollout_file) == (HEADER, GROUPS)
    write_rollout_file(tmp_path / "none", RolloutFileHeader(), ())
    assert read_rollout_file(tmp_path / "none").groups == ()
    (tmp_path / "text").write_text("name = 'demo'\n")
    known = {name: is_rollout_file(tmp_path / name) for name in ("rollouts", "none", "text", "absent", "")}
    assert known == {"rollouts": True, "none": True, "text": False, "absent": False, "": False}


def test_a_rollout_file_cut_off_or_altered_anywhere_is_refused(rollout_file):
    whole = rollout_file.read_bytes()
    for cut in (*range(len(MAGIC), len(whole), 97), len(whole) - 1):
        rollout_file.write_bytes(whole[:cut])
        with pytest.raises(RolloutFileError, match="checksum differs: the file was cut off or altered; write it again"):
            read_rollout_file(rollout_file)
    for place in range(0, len(whole), 13):
        rollout_file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(RolloutFileError, match=re.escape(str(rollout_file))):
            read_rollout_file(rollout_file)


def test_what_is_no_rollout_file_is_refused_by_its_name(tmp_path, rollout_file):
    later = msgspec.structs.replace(HEADER, recording_version=FORMAT + 1)
    write_rollout_file(tmp_path / "later", later, GROUPS)
    (tmp_path / "run.toml").write_text("name = 'demo'\n")
    (tmp_path / "longer").write_bytes(rollout_file.read_bytes() + b"x")
    for name, message in {
        "absent": "absent: no such file",
        "run.toml": "run.toml: not a rollout file",
        "longer": "checksum differs",
        "later": "recording_version: 2, this reader knows 1 to 1",
    }.items():
        with pytest.raises(RolloutFileError, match=message):
            read_rollout_file(tmp_path / name)


def test_a_group_that_breaks_the_contract_is_not_written_and_leaves_the_old_file(rollout_file):
    before = rollout_file.read_bytes()
    with pytest.raises(RecordError, match="rollouts is empty"):
        write_rollout_file(rollout_file, HEADER, (GROUPS[0], msgspec.structs.replace(GROUPS[1], rollouts=())))
    assert rollout_file.read_bytes() == before
    assert [file.name for file in rollout_file.parent.iterdir()] == [rollout_file.name]
