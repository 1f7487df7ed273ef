"""Children that hold to their parent: with it gone they are gone, wherever in their start they were."""

import multiprocessing
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from penstock.producers.engines.parent_death import (
    SOCKETS_PREFIX,
    SOCKETS_VARIABLE,
    BoundForkProcess,
    BoundSpawnProcess,
    children_bound,
)
from process_family import MARK, family
from waiting import wait_for

ROOT = Path(__file__).parents[3]

# The child says `here` while its target is still being unpickled, as vLLM's import is; then, working, it starts a
# process of its own.
PARENT = """
import multiprocessing, pathlib, subprocess, sys, time
from penstock.producers.engines.parent_death import children_bound

class Slow:
    def __reduce__(self):
        return arrive, ()

def arrive():
    pathlib.Path(sys.argv[2], "here").touch()
    time.sleep(600 if sys.argv[3] == "starting" else 0)
    return Slow()

def work(slow):
    subprocess.Popen(["sleep", "600"])
    pathlib.Path(sys.argv[2], "working").touch()
    time.sleep(600)

if __name__ == "__main__":
    with children_bound():
        multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(Slow(),)).start()
    time.sleep(600)
"""


@pytest.fixture
def start_parent(tmp_path: Path):
    mark = str(uuid.uuid4())
    (tmp_path / "parent.py").write_text(PARENT)

    def start(*arguments: str) -> tuple[subprocess.Popen, str]:
        (sockets := tmp_path / f"{SOCKETS_PREFIX}1").mkdir()
        environment = os.environ | {"PYTHONPATH": str(ROOT), MARK: mark, SOCKETS_VARIABLE: str(sockets)}
        command = [sys.executable, str(tmp_path / "parent.py"), arguments[0], str(tmp_path), *arguments[1:]]
        return subprocess.Popen(command, env=environment), mark

    yield start
    for process in family(mark):
        process.kill()


@pytest.mark.parametrize(("method", "moment"), [("spawn", "starting"), ("spawn", "working"), ("fork", "working")])
def test_a_child_ends_with_its_parent_and_takes_its_own_along(start_parent, tmp_path, method, moment):
    parent, mark = start_parent(method, moment)
    wait_for((tmp_path / ("here" if moment == "starting" else "working")).exists)
    assert len(family(mark)) >= (2 if moment == "starting" else 3)
    parent.kill()
    parent.wait()
    wait_for(lambda: not family(mark))
    assert not list(tmp_path.glob(f"{SOCKETS_PREFIX}*"))


def test_a_child_whose_parent_died_before_it_could_run_ends_at_once(start_parent, tmp_path):
    parent, mark = start_parent("spawn", "starting")
    wait_for(lambda: len(psutil.Process(parent.pid).children()) > 0)
    parent.kill()
    parent.wait()
    wait_for(lambda: not family(mark))


def test_a_child_that_ends_by_itself_is_joined_and_the_contexts_are_as_before():
    with children_bound():
        for method, kind in (("spawn", BoundSpawnProcess), ("fork", BoundForkProcess)):
            assert multiprocessing.get_context(method).Process is kind
        process = multiprocessing.get_context("spawn").Process(target=os._exit, args=(7,))
        process.start()
    process.join(120)
    assert process.exitcode == 7
    assert multiprocessing.get_context("spawn").Process is multiprocessing.context.SpawnProcess
    assert multiprocessing.get_context("fork").Process is multiprocessing.context.ForkProcess
