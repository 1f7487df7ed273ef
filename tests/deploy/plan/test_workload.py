"""Lengths of completions: what files and names give, and what is refused."""

from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.deploy.plan.workload import lengths_of, of_buckets, of_groups
from penstock.schemas.config import ConfigError


def test_a_distribution_has_its_mean():
    def mean(given: str) -> float:
        return sum(lengths_of(given)(Random(1), 20_000)) / 20_000

    assert mean("constant:12") == 12
    assert mean("uniform:10:30") == pytest.approx(20, rel=0.02)
    assert mean("exponential:50") == pytest.approx(50, rel=0.03)
    assert mean("log-normal:100:0.5") == pytest.approx(100 * 2.718281828 ** (0.5**2 / 2), rel=0.02)


def test_siblings_of_a_file_s_group_stay_together(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text("[1, 2, 3]\n\n[100, 200, 300]\n")
    draw, random = lengths_of(str(file)), Random(1)
    drawn = {tuple(sorted(draw(random, 3))) for _ in range(20)}
    assert drawn == {(1, 2, 3), (100, 200, 300)}
    assert {max(draw(random, 5)) < 10 for _ in range(20)} == {True, False}


def test_numbers_of_a_file_are_drawn_one_by_one(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("7\n1000\n")
    draw, random = lengths_of(str(file)), Random(1)
    assert {tuple(draw(random, 2)) for _ in range(50)} == {(7, 7), (7, 1000), (1000, 7), (1000, 1000)}


def test_fewer_siblings_than_a_group_has_are_different_ones():
    draw = of_groups([[1, 2, 3, 4]])
    assert all(len(set(draw(Random(seed), 3))) == 3 for seed in range(20))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12\n-4\n", "line 2: -4: expected a number of tokens above 0"),
        ("[12, 0]\n", r"line 1: \[12, 0\]: expected a number of tokens above 0"),
        ("\n12\nlong\n", "line 3: long: expected a number of tokens above 0"),
        ("true\n", "line 1: true: expected"),
        ("NaN\n", "line 1: NaN: expected"),
        ("[]\n", r"line 1: \[\]: expected"),
        ("12\n" + 100_000 * "[", r"line 2: \[{57}\.\.\.: expected a number of tokens above 0"),
        (6_000 * "1", r"line 1: 1{57}\.\.\.: expected a number of tokens above 0"),
        ("1e999\n", "line 1: Infinity: expected a number of tokens above 0"),
        ("\x1b[2J\n", r"line 1: \\x1b\[2J: expected"),
        ("\n \n", "no length in it, expected a number of tokens a line"),
        ("", "no length in it, expected a number of tokens a line"),
    ],
    ids=lambda given: given[:20],
)
def test_a_file_that_holds_no_lengths_is_refused_by_its_line(tmp_path, text, said):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--lengths {file}: {said}"):
        lengths_of(str(file))


def test_a_byte_order_mark_is_no_part_of_a_file_s_first_length(tmp_path):
    file = tmp_path / "lengths.txt"
    file.write_text("7\n7\n", encoding="utf-8-sig")
    assert lengths_of(str(file))(Random(1), 3) == [7, 7, 7]


def test_a_file_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match="--lengths /proc/self/mem: cannot be read: Input/output error"):
        lengths_of("/proc/self/mem")


@pytest.mark.parametrize("given", ["log-normal:800:1000", "log-normal:1:1e300", "log-normal:1e300:300"])
def test_a_distribution_may_be_as_wide_as_it_likes(given):
    drawn = lengths_of(given)(Random(1), 50)
    assert min(drawn) >= 0 and max(drawn) > 1e300


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "lengths.bin"
    file.write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ConfigError, match=r"expected lines of text, or a name ending in \.parquet"):
        lengths_of(str(file))


def test_a_parquet_file_has_a_length_or_a_group_a_row(tmp_path):
    file = tmp_path / "lengths.parquet"
    pq.write_table(pa.table({"tokens": [7, 1000]}), file)
    assert set(lengths_of(str(file))(Random(1), 50)) == {7, 1000}
    pq.write_table(pa.table({"tokens": [[1, 2, 3], [100, 200, 300]]}), file)
    draw, random = lengths_of(str(file)), Random(1)
    assert {tuple(sorted(draw(random, 3))) for _ in range(20)} == {(1, 2, 3), (100, 200, 300)}


def test_an_exported_record_has_the_lengths_of_its_groups(tmp_path):
    """Segments of a rollout are added up; a group that was not sampled whole is left out."""
    columns = ("epoch", "position", "index", "outcome", "rollout", "segment", "positions")
    rows = [
        (1, 0, 5, "trained", 0, 0, [1, 2]),
        (1, 0, 5, "trained", 0, 1, [1]),
        (1, 0, 5, "trained", 1, 0, [1, 2, 3, 4]),
        (1, 0, 6, "dead", 0, 0, [1] * 50),
        (1, 1, 7, "skipped", 0, 0, [1] * 10),
        (1, 1, 7, "skipped", 1, 0, [1] * 11),
    ]
    file = tmp_path / "record.parquet"
    pq.write_table(pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows]), file)
    draw, random = lengths_of(str(file)), Random(1)
    assert {tuple(sorted(draw(random, 2))) for _ in range(20)} == {(3, 4), (10, 11)}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"tokens": [12, -4]}, "row 2: -4: expected a number of tokens above 0"),
        ({"tokens": [[12], [12, 0]]}, r"row 2: \[12, 0\]: expected a number of tokens above 0"),
        ({"tokens": [12, None]}, "row 2: null: expected a number of tokens above 0"),
        ({"tokens": ["long"]}, "row 1: long: expected a number of tokens above 0"),
        ({"tokens": []}, "no length in it, expected a number of tokens a row"),
        ({"tokens": [1], "other": [2]}, "columns tokens, other: expected a single one, or an exported record"),
    ],
    ids=str,
)
def test_a_parquet_file_that_holds_no_lengths_is_refused(tmp_path, columns, said):
    file = tmp_path / "lengths.parquet"
    pq.write_table(pa.table(columns), file)
    with pytest.raises(ConfigError, match=f"--lengths {file}: {said}"):
        lengths_of(str(file))


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    file = tmp_path / "lengths.parquet"
    file.write_text("12\n")
    with pytest.raises(ConfigError, match=f"--lengths {file}: cannot be read: "):
        lengths_of(str(file))


def test_parquet_needs_its_extra(tmp_path, monkeypatch):
    file = tmp_path / "lengths.parquet"
    file.touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"pyarrow is not installed; expected the extra: pip install 'penstock\[parquet"
    ):
        lengths_of(str(file))


def test_counts_by_length_keep_their_mean_and_bounds():
    draw, random = of_buckets([(3, 3, 1), (10, 7000, 1024), (10, 10230, 1024), (5, 7500, 2048)]), Random(1)
    drawn = sorted(draw(random, 20_000))
    assert drawn[0] == 1 and drawn[-1] <= 2048
    assert sum(drawn) / len(drawn) == pytest.approx((3 + 7000 + 10230 + 7500) / 28, rel=0.02)
    assert not any(1 < length < 513 for length in drawn)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("log-normall:800:1.2", "neither a file, nor a run, nor one of .*; did you mean log-normal"),
        ("nothing-like-it", "neither a file, nor a run, nor one of constant:TOKENS, "),
        ("log-normal:800", "expected log-normal:MEDIAN:SIGMA, with numbers above 0"),
        ("log-normal:-800:1.2", "expected log-normal:MEDIAN:SIGMA, with numbers above 0"),
        ("constant:nan", "expected constant:TOKENS, with numbers above 0"),
        ("uniform:20:10", "expected uniform:LEAST:MOST, with numbers above 0"),
    ],
)
def test_a_name_that_is_no_distribution_is_refused(given, said):
    with pytest.raises(ConfigError, match=f"--lengths {given}: {said}"):
        lengths_of(given)


def test_no_name_at_all_is_no_folder():
    with pytest.raises(ConfigError, match="--lengths '': expected a file, a run, or one of constant:TOKENS"):
        lengths_of("")
