import stat
from pathlib import Path

import pytest

from penstock.schemas.process.files import replacing, write_whole


def test_a_file_is_replaced_with_what_is_written(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_whole(file, "first")
    write_whole(file, "sécond".encode())
    assert file.read_text(encoding="utf-8") == "sécond"
    assert list(tmp_path.iterdir()) == [file]


def test_what_fails_in_the_middle_leaves_the_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_whole(file, "first")
    with pytest.raises(OSError, match="full"), replacing(file) as partial:
        partial.write_text("half")
        raise OSError("the disk is full")
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_a_secret_is_readable_by_its_owner_only_from_its_first_byte_on(tmp_path: Path) -> None:
    file = tmp_path / "connection.json"
    file.write_text("old")
    file.chmod(0o644)
    write_whole(file, "secret", mode=0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
