"""Lengths of completions: what files and names give, and what is refused."""

from random import Random

import pytest

from penstock.deploy.plan.workload import lengths_of, of_groups
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
        ("\n \n", "no length in it, expected a number of tokens a line"),
        ("", "no length in it, expected a number of tokens a line"),
    ],
)
def test_a_file_that_holds_no_lengths_is_refused_by_its_line(tmp_path, text, said):
    file = tmp_path / "lengths.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--lengths {file}: {said}"):
        lengths_of(str(file))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "lengths.parquet"
    file.write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ConfigError, match="expected lines of text"):
        lengths_of(str(file))


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
