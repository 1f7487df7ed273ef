"""Lines and the ledger file of a run folder on a disk without room: training goes on, and what is lost is said."""

import contextlib
import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.consumers.checkpoints.state import CheckpointState
from penstock.consumers.observe.run_log import LedgerFile
from penstock.consumers.stream.ledger import Ledger
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.process.json_lines import MAX_WAITING_LINES, JsonLines
from trainer_bench import assert_settled_once
from trainer_process import TrainerProcesses


@contextlib.contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond `num_bytes`; the write that would is cut there, as by a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read(file: Path) -> list[int]:
    """The numbers of the whole lines."""
    return [json.loads(line)["n"] for line in file.read_text().splitlines() if line.endswith("}")]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert not [record for record in caplog.records if record.exc_info]
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_lines_that_do_not_fit_wait_for_room_and_none_is_torn(tmp_path, caplog):
    for room in (100, 101, 109, 110, 111):
        caplog.clear()
        file = tmp_path / f"updates-{room}.jsonl"
        file.write_text('{"n": 9, "lag_hi')  # torn by a kill: it stays a line of its own, of 17 bytes
        lines = JsonLines(file)
        for n in range(10, 20):
            lines.write(n=n)  # of 10 bytes each
        with disk_of(17 + room):
            for n in range(20, 25):
                lines.write(n=n)
            assert read(file) == list(range(10, 20 + (room - 100) // 10)), "whole lines only"
        lines.write(n=25)
        lines.close()
        assert read(file) == list(range(10, 26))
        assert warnings(caplog) == [
            f"{file} cannot be written: [Errno 27] File too large; the run continues, its lines wait"
        ]


def test_lines_beyond_those_that_may_wait_are_lost_and_counted(tmp_path, caplog):
    file = tmp_path / "updates.jsonl"
    lines = JsonLines(file)
    with disk_of(0):
        for n in range(MAX_WAITING_LINES + 7):
            lines.write(n=n)
    lines.write(n=-1)
    lines.write(n=-2)
    assert read(file) == [*range(7, MAX_WAITING_LINES + 7), -1, -2]
    assert warnings(caplog)[1:] == [f"{file}: 7 lines are lost"]
    with disk_of(0):
        lines.write(n=-3)
    assert len(warnings(caplog)) == 3, "a disk that is full again is said again"
    lines.close()
    assert read(file)[-1] == -3 and len(warnings(caplog)) == 3
    caplog.clear()
    lines = JsonLines(Path("/dev/full"))
    for n in range(50):
        lines.write(n=n)
    lines.close()
    assert warnings(caplog) == [
        "/dev/full cannot be written: [Errno 28] No space left on device; the run continues, its lines wait",
        "/dev/full: 50 lines are lost",
    ]


def test_a_ledger_file_that_does_not_fit_is_left_as_it_was(tmp_path, caplog):
    file = tmp_path / "trainer.json"
    ledger, progress = Ledger(), RunProgress(0, CheckpointState(policy_version=-1))
    ledger_file = LedgerFile(file)

    def write() -> None:
        progress.num_batches += 1
        ledger_file.write(ledger, progress, 0, finished=False)

    write()
    with disk_of(0):
        write()
        write()
        assert json.loads(file.read_text())["num_updates"] == 1
    write()
    assert json.loads(file.read_text())["num_updates"] == 4
    (warning,) = warnings(caplog)
    assert warning.startswith(f"{file} cannot be written: [Errno 27] File too large; it is written with a later")


# The run folder is a small tmpfs of the process's own, full from one step to another: lines, ledger and checkpoints go
# there. What it holds at the end is copied out, for it goes with the process.
FULL_RUN_FOLDER = """
import os, shutil, sys
from pathlib import Path
from tests.chaos.disk import SmallDisk, enter_namespace

if not enter_namespace():
    sys.exit(77)
folder = Path(os.environ["RUN_FOLDER"])
disk = SmallDisk(folder)
from scripted_learner import ScriptedLearner
import penstock.consumers.__main__ as entry
from penstock.deploy.cli import main

class Learner(ScriptedLearner):
    def step(self, batch):
        if self.num_steps == 5:
            disk.fill(0)
        if self.num_steps == 30:
            disk.drain()
        return super().step(batch)

entry.load_learner = Learner
status = main(sys.argv[1:])
shutil.copytree(folder, os.environ["COPY"])
sys.exit(status)
"""


@pytest.mark.redis
def test_a_run_whose_folder_is_full_for_a_while_trains_on_and_has_every_line(
    bench, redis_client, processes: TrainerProcesses, tmp_path, monkeypatch
):
    copy = tmp_path / "copy" / "test"
    bench.overrides = ["num_updates=40", "evaluation.every=10"]
    monkeypatch.setenv("RUN_FOLDER", str(bench.folder))
    monkeypatch.setenv("COPY", str(copy))
    bench.producer()
    process = processes.start("trainer", program=FULL_RUN_FOLDER)
    status = process.wait(120)
    log = processes.log("trainer")
    if status == 77:
        pytest.skip("mount namespaces are unavailable here")
    assert status == 0, log
    assert "Traceback" not in log
    bench.runs = copy.parent
    assert_settled_once(bench, redis_client)
    assert [line["update"] for line in bench.lines("updates.jsonl")] == list(range(1, 41))
    assert [line["update"] for line in bench.lines("evaluations.jsonl")] == [0, 10, 20, 30, 40]
    assert bench.ledger()["finished"]
    told = [line for line in log.splitlines() if "No space left on device" in line]
    assert len([line for line in told if "updates.jsonl cannot be written" in line]) == 1
    assert "no checkpoint: the record of rollouts cannot be written" in log, "the checkpoint of update 8"
    assert "the record is written again" in log
    assert "lines are lost" not in log
