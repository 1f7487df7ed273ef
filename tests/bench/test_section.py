"""The sections share the choice of rows, their measurement, and the treatment of failures."""

import json
import sys

import pytest
import redis

from bench import __main__ as command
from bench.result import BenchError, Figure
from bench.section import Bench, measure_apart, wait_for
from penstock.deploy.launch.child import Child


def test_rows_choose_their_sections():
    assert command.choose_rows([], ["time", "records"]) == {"pipeline": ("records",), "head": ("time",)}
    assert command.choose_rows([], ["accuracy"]) == {"head": ("accuracy",)}
    assert set(command.choose_rows([], ["peers"])) == {"stream", "head", "trainer"}
    assert command.choose_rows(["head"], []) == {"head": ("accuracy", "memory", "time", "peers")}
    with pytest.raises(command.ConfigError, match="--only records: no row of head; expected one of accuracy"):
        command.choose_rows(["head"], ["records"])
    with pytest.raises(command.ConfigError, match="heads: no section; expected pipeline, weights, stream, head"):
        command.choose_rows(["heads"], [])


def test_an_unknown_row_or_run_file_is_named(capsys, tmp_path):
    assert command.main(["--only", "nonsense"]) == 2
    error = capsys.readouterr().err
    sections = "pipeline, weights, stream, head, endpoint, trainer"
    assert f"--only nonsense: no row of {sections}; expected one of records" in error
    assert command.main(["--run-file", str(tmp_path / "none.toml")]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "row", "figure"),
    [
        ("pipeline", "records", "rollout bytes per completion token"),
        ("stream", "encode", "encoding a group"),
        ("endpoint", "encoding", "tokens encoded in a conversation of 10 calls"),
    ],
)
def test_one_row_runs_alone_and_writes_its_result(section, row, figure, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    assert command.main(["--only", row, "--quick", "--output", str(tmp_path)]) == 0
    (file,) = tmp_path.glob(f"{section}-{row}-*.json")
    found = json.loads(file.read_text())
    assert {"date", "machine", "settings"} <= set(found)
    assert found["figures"][0]["name"] == figure
    assert found["figures"][0]["goal"] is not None
    assert f"{section}: {row} ..." in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())


def test_a_server_that_is_lost_is_one_line_and_its_logs_are_kept(tmp_path, monkeypatch, capsys):
    def fail(bench: Bench) -> list[Figure]:
        raise redis.ConnectionError("connection refused")

    monkeypatch.setitem(command.SECTIONS["stream"].rows, "memory", fail)
    monkeypatch.setattr(command, "WORK", tmp_path)
    assert command.main(["stream", "--only", "memory"]) == 1
    (folder,) = tmp_path.iterdir()
    assert capsys.readouterr().err == (
        f"bench: logs of what failed are in {folder}\nbench: memory: connection refused\n"
    )


def test_a_process_that_dies_is_named_with_the_end_of_its_log(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(BenchError, match=r"head ended with status 3; its log ends:\nno torch here"):
        measure_apart("head", "bench.head.part", {}, dict, tmp_path, python=str(python))


def test_lines_of_a_part_that_say_how_far_it_is_are_printed_once(tmp_path, capsys):
    code = "import time\nfor n in range(3): print(f'bench: {n}\\nloaded', flush=True); time.sleep(0.1)"
    wait_for([Child("part", [sys.executable, "-c", code], log=tmp_path / "part.log")])
    assert capsys.readouterr().out == "bench: 0\nbench: 1\nbench: 2\n"
