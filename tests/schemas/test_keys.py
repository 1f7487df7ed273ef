"""Numbers in fields of entries: ones that a record can hold, or none."""

import msgspec
import pytest

from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.keys import Keys, check_name, number_in


def test_up_to_18_digits_are_a_number_and_anything_else_is_none() -> None:
    for field in (b"0", b"7", b"007", b"9" * 18):
        assert number_in(field) == int(field)
    others = (b"", b"9" * 19, b"9" * 5000, b"-1", b"+1", b" 1", b"1\n", b"1_0", b"1.0", b"1e3", b"\xff", "٣".encode())
    for field in (None, *others):
        assert number_in(field) is None, field


def test_a_heartbeat_nested_too_deep_is_refused_like_any_that_cannot_be_read() -> None:
    with pytest.raises(msgspec.DecodeError, match="nested too deep"):
        decode_heartbeat(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


def test_a_name_is_one_folder_of_its_own() -> None:
    for name in ("demo", "...", ".hidden", "a.b_C-9", "n" * 128):
        Keys(name)
    for name in ("", ".", "..", "../x", "a/b", "a b", "-a", "--resume", "ü", "a\n", "n" * 129, "n" * 250):
        with pytest.raises(ValueError, match=r"run name .* expected"):
            Keys(name)
    with pytest.raises(ValueError, match=r"--id '\.\.': expected letters"):
        check_name("--id", "..")
