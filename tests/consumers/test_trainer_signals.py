"""A trainer that is stopped before it trains: nothing is left behind, and the run is as it was. One that the user's
code ends."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from forked_programs import ForkedProgram
from trainer_bench import TrainerBench, assert_settled_once
from trainer_process import BARE, TrainerProcesses, with_learner
from waiting import wait_for

pytestmark = pytest.mark.redis

LINE = "stopped before training began; the run is as it was"

IMPORTING = BARE.format(
    setup="""
import os

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            Path(os.environ["MARKER"]).touch()
            time.sleep(300)

sys.meta_path.insert(0, Slow())
"""
)

LOADING_THE_MODEL = with_learner("""
class Learner(ScriptedLearner):
    def __init__(self, config, ranks):
        Path(os.environ["MARKER"]).touch()
        time.sleep(300)
""")

ENDED_BY_AN_OBJECTIVE = with_learner("""
class Learner(ScriptedLearner):
    def step(self, batch):
        sys.exit(0)
""")

LOADING_THE_CHECKPOINT = with_learner("""
class Learner(ScriptedLearner):
    def load_checkpoint(self, folder, state):
        Path(os.environ["MARKER"]).touch()
        time.sleep(300)
""")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that a program makes when it has come to where it stays."""
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    return tmp_path / "marker"


def everything(bench: TrainerBench, client: redis.Redis) -> dict[str, object]:
    """Returns all that a run consists of: its checkpoints and epochs on disk, and its keys in Redis but the lease."""
    read = {b"stream": client.xrange, b"hash": client.hgetall}
    keys = [key for key in client.scan_iter() if not key.endswith(b":lease")]
    files = [file for file in (bench.folder / "checkpoints").rglob("*") if file.is_file()]
    on_disk = {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in files}
    return {"redis": {key: read[client.type(key)](key) for key in keys}, "disk": on_disk}


def a_stopped_run(bench: TrainerBench) -> None:
    """Its trainer leaves no answer of an evaluation unread, which the next one would remove and ask for anew."""
    bench.overrides.append("evaluation.num_prompts=0")
    bench.producer()
    bench.stopped_at(6)
    for producer in bench.producers:
        producer.stop.set()
        producer.join()


def assert_stops(
    processes: TrainerProcesses,
    process: subprocess.Popen | ForkedProgram,
    number: int,
    there: Callable[[], object],
    log: str,
) -> None:
    wait_for(lambda: there() or process.poll() is not None)
    assert process.poll() is None, processes.log(log)
    process.send_signal(number)
    assert process.wait(60) == 0, processes.log(log)
    lines = processes.log(log).splitlines()
    assert lines[-1].endswith(LINE) and sum(LINE in line for line in lines) == 1
    assert "Traceback" not in processes.log(log)


@pytest.mark.parametrize(
    ("program", "number"), [(IMPORTING, signal.SIGINT), (LOADING_THE_MODEL, signal.SIGTERM)], ids=["imports", "model"]
)
def test_a_new_trainer_stopped_while_it_boots_leaves_no_run_behind(
    bench, redis_client, processes, marker, program, number
):
    process = processes.start("booting", program=program, fresh=program is IMPORTING)
    assert_stops(processes, process, number, marker.exists, "booting")
    assert everything(bench, redis_client) == {"redis": {}, "disk": {}}
    bench.producer()
    assert bench.trainer().run(), "the name is free: it needs no --resume"
    assert_settled_once(bench, redis_client)


def test_a_trainer_stopped_while_it_boots_to_resume_leaves_the_run_as_it_was(bench, redis_client, processes, marker):
    a_stopped_run(bench)
    before = everything(bench, redis_client)
    process = processes.start("booting", "--resume", program=LOADING_THE_MODEL)
    assert_stops(processes, process, signal.SIGTERM, marker.exists, "booting")
    assert everything(bench, redis_client) == before


def test_a_trainer_that_an_objective_ends_leaves_a_status_and_a_line(bench, processes):
    bench.producer()
    assert processes.start("ended", program=ENDED_BY_AN_OBJECTIVE).wait(60) == 1, processes.log("ended")
    assert "the trainer ends: the user's code raised SystemExit: 0" in processes.log("ended")


def test_a_trainer_stopped_while_it_loads_its_checkpoint_changes_only_the_epoch(bench, redis_client, processes, marker):
    bench.overrides = ["trainer.lease_s=30.0"]
    a_stopped_run(bench)
    before = everything(bench, redis_client)
    process = processes.start("booting", "--resume", program=LOADING_THE_CHECKPOINT)
    assert_stops(processes, process, signal.SIGTERM, marker.exists, "booting")
    assert not redis_client.exists(bench.keys.lease), "it hands the run over at once"
    after = everything(bench, redis_client)
    commit = bench.keys.commit.encode()
    own = {b"epoch", b"owner"}
    changed = dict(after["redis"][commit].items() ^ before["redis"][commit].items())
    assert changed.keys() == own and after["redis"][commit][b"epoch"] == b"1"
    after["redis"][commit] = before["redis"][commit]
    (epoch_file,) = after["disk"].keys() - before["disk"].keys()
    assert Path(epoch_file).name == "epoch-1"
    del after["disk"][epoch_file]
    assert after == before
    bench.producer()
    second = bench.trainer(resume=True)
    assert (second.leadership.scripts.epoch, second.learner.num_steps) == (2, 7)
    assert second.run()
    assert_settled_once(bench, redis_client)


@pytest.mark.parametrize("state", ["not begun", "held by another"])
def test_a_trainer_stopped_while_it_stands_by_leaves_the_run_as_it_was(bench, redis_client, processes, state):
    if state == "held by another":
        bench.trainer()
    before = everything(bench, redis_client)
    lease = redis_client.get(bench.keys.lease)
    assert (lease is not None) == (state == "held by another")
    process = processes.start("standby", "--standby")
    assert_stops(
        processes, process, signal.SIGTERM, lambda: "standing by for run test" in processes.log("standby"), "standby"
    )
    assert everything(bench, redis_client) == before
    assert redis_client.get(bench.keys.lease) == lease


def test_a_standby_stopped_while_it_takes_over_hands_the_run_to_the_next_one(bench, redis_client, processes, marker):
    bench.overrides = ["trainer.lease_s=2.0"]
    a_stopped_run(bench)
    before = everything(bench, redis_client)
    process = processes.start("standby", "--standby", program=LOADING_THE_MODEL)
    wait_for(lambda: marker.exists() and redis_client.exists(bench.keys.lease))
    assert_stops(processes, process, signal.SIGTERM, marker.exists, "standby")
    assert not redis_client.exists(bench.keys.lease)
    assert everything(bench, redis_client) == before


def test_a_standby_whose_redis_is_away_is_stopped_at_once(bench, redis_client, processes, monkeypatch):
    with bench.proxy() as proxy:
        monkeypatch.setattr(bench, "url", proxy.url)
        process = processes.start("standby", "--standby")
        wait_for(lambda: "standing by" in processes.log("standby"))
        proxy.refuse()
        assert_stops(processes, process, signal.SIGTERM, lambda: "is away" in processes.log("standby"), "standby")
