"""The launcher with stand-ins for its parts: real processes, a real Redis, real signals."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from process_family import holders_of_files
from waiting import wait_for

pytestmark = pytest.mark.redis

STAND_IN_RUN = Path(__file__).with_name("stand_in_run.py")
NAME = "stand-in"


class LaunchedRun:
    """`penstock run` as a process of its own, its parts played by stand-ins."""

    def __init__(self, runs: Path, boots_at_once: int = 1, **behaviors: str) -> None:
        self.folder = runs / NAME
        runs.mkdir(exist_ok=True)
        self._output = runs / "output"
        pairs = [f"{part.replace('_', '-')}={behavior}" for part, behavior in behaviors.items()]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(STAND_IN_RUN), str(runs), NAME, str(boots_at_once), *pairs],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, event: str, times: int = 1) -> None:
        """Until a part has told of `<part> <event>`, or the launcher of `<part>: <state>`, so often."""
        wait_for(
            lambda: self.events().count(event) + self._output.read_text().count(event),
            lambda count: count >= times,
            process=self.process,
            log=lambda: f"{event!r} in {self.events()}: {self._output.read_text()}",
        )

    def events(self) -> list[str]:
        file = self.folder / "events"
        return [line.rpartition(" ")[0] for line in file.read_text().splitlines()] if file.exists() else []

    def times(self, event: str) -> list[float]:
        lines = (self.folder / "events").read_text().splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(event)]

    def output(self, timeout: float = 90) -> str:
        self.process.wait(timeout)
        return self._output.read_text()

    def log(self, part: str) -> str:
        return (self.folder / "logs" / f"{part}.log").read_text()

    def wait_for_end(self) -> None:
        """Until none is there any more; a process that was killed lives until the kernel gets to it."""
        wait_for(self.living, lambda pids: pids == [])

    def living(self) -> list[int]:
        """Processes of the run that are still there: the parts, what they started, and Redis."""
        told = [word for event in self.events() for word in event.split() if word.startswith(("started-", "core-"))]
        pids = {int(word.rpartition("-")[2]) for word in told}
        return sorted(pid for pid in pids | holders_of_files(self.folder) if _lives(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[LaunchedRun]]:
    started: list[LaunchedRun] = []

    def start(boots_at_once: int = 1, **behaviors: str) -> LaunchedRun:
        run = LaunchedRun(tmp_path / "runs", boots_at_once, **behaviors)
        started.append(run)
        return run

    yield start  # type: ignore[misc]
    for run in started:
        if run.process.poll() is None:
            run.process.kill()
        run.process.wait()


def test_a_finished_run_ends_with_status_0_and_leaves_nothing_running(start):
    """Where cores allow, every part is started before the first has booted, each with its threads and its own GPUs."""
    run = start(boots_at_once=2, trainer="finish")
    shown = run.output()
    assert run.process.returncode == 0, shown
    states = [line.split("  ")[1] for line in shown.splitlines()]
    assert states[1:4] == ["producer-0: starting the engine", "producer-1: starting the engine", "trainer: running"]
    assert "update 5/5" in shown and "trainer: finished" in shown and "producer-0 finished" in run.events()
    assert "threads 1" in run.log("trainer") and "GPU 0\n" in run.log("trainer")
    for number in (1, 2):
        seen = f"GPU {number} --set engine.gpu_memory_utilization=0.5\n"
        assert seen in run.log(f"producer-{number - 1}")
    run.wait_for_end()
    assert not (run.folder / "redis" / "connection.json").exists()


def test_ctrl_c_stops_the_trainer_first_then_producers_then_redis(start):
    """One at a time, producers boot one after another and the trainer last."""
    run = start()
    run.wait_for("  update ")
    run.process.send_signal(signal.SIGINT)
    shown = run.output()
    assert run.process.returncode == 128 + signal.SIGINT, shown
    (first_served, *_), (second_started, *_) = run.times("producer-0 serving"), run.times("producer-1 started")
    assert second_started > first_served and shown.index("producer-1: ready") < shown.index("trainer: running")
    events = run.events()
    assert events.index("trainer checkpoint") < events.index("trainer ended")
    for producer in ("producer-0", "producer-1"):
        assert events.index("trainer ended") < events.index(f"{producer} asked-to-stop")
        assert f"{producer} handed-back" in events
    assert "User requested shutdown" in run.log("redis") or "SIGTERM" in run.log("redis")
    run.wait_for_end()


def test_a_closed_terminal_stops_in_order(tmp_path):
    """The kernel sends SIGHUP to the session of a terminal that is gone, and writing there fails."""
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
        os.execv(sys.executable, [sys.executable, str(STAND_IN_RUN), str(tmp_path), NAME, "1"])
    events = tmp_path / NAME / "events"
    wait_for((tmp_path / NAME / "updates.jsonl").exists, log=lambda: str(events))
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert "trainer checkpoint" in events.read_text() and "producer-1 handed-back" in events.read_text()


def test_what_keeps_a_run_from_going_on_is_told_and_its_end(start):
    run = start()
    run.wait_for("  update ")
    connection = json.loads((run.folder / "redis" / "connection.json").read_text())
    with redis.Redis.from_url(connection["url"], protocol=2) as client:
        server = client.info("server")["process_id"]
        os.kill(server, signal.SIGSTOP)
        run.wait_for("the run stands still: redis is suspended (SIGSTOP): ")
        os.kill(server, signal.SIGCONT)
        run.wait_for("the run goes on")
    run.process.terminate()
    assert run.output().count("the run stands still") == 1
    assert run.process.returncode == 128 + signal.SIGTERM and "trainer checkpoint" in run.events()
    run.wait_for_end()


def test_second_ctrl_c_kills_a_part_that_does_not_listen(start):
    run = start(trainer="deaf")
    run.wait_for("  update ")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("trainer asked-to-stop")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    shown = run.output(timeout=60)
    assert run.process.returncode == 128 + signal.SIGINT, shown
    assert "trainer: was killed by SIGKILL" in shown
    run.wait_for_end()


def test_a_trainer_that_dies_ends_the_run_with_the_end_of_its_log(start):
    run = start(trainer="broken")
    shown = run.output()
    assert run.process.returncode == 1
    assert "penstock: 64 groups have died in a row: reward: KeyError: 'gold'; trainer ended with status 1" in shown
    assert shown.count("KeyError") == 1, "first, and once"
    assert str(run.folder / "logs" / "trainer.log") in shown
    assert "Traceback" not in shown
    run.wait_for_end()


def test_a_redis_that_dies_ends_the_run(start):
    run = start()
    run.wait_for("producer-0: ready")
    connection = json.loads((run.folder / "redis" / "connection.json").read_text())
    with redis.Redis.from_url(connection["url"], protocol=2) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    shown = run.output()
    assert run.process.returncode == 1
    assert "redis was killed by SIGKILL" in shown
    run.wait_for_end()


def test_a_producer_that_dies_is_started_again_and_what_it_left_is_killed(start):
    run = start(producer_0="dies-when-told")
    run.wait_for("producer-0: ready")
    (run.folder / "die").touch()
    run.wait_for("producer-0: ready", times=2)
    (orphan, *_) = [event for event in run.events() if event.startswith("producer-0 core-")]
    wait_for(lambda: not _lives(int(orphan.rpartition("-")[2])))
    assert not (run.folder / "die").exists()
    run.process.send_signal(signal.SIGINT)
    shown = run.output()
    assert "producer-0: ended with status 1, starting again in 1 s" in shown
    run.wait_for_end()


def test_kill_9_of_the_launcher_takes_every_part_along(start):
    run = start()
    run.wait_for("  update ")
    parts = [int(event.rpartition("-")[2]) for event in run.events() if " started-" in event]
    assert len(parts) == 3
    run.process.kill()
    run.process.wait()
    # An engine's own processes die with their parent by the engine's means; the stand-in's have none.
    cores = {int(event.rpartition("-")[2]) for event in run.events() if " core-" in event}
    wait_for(
        lambda: [pid for pid in (*parts, *holders_of_files(run.folder)) if pid not in cores and _lives(pid)],
        lambda left: left == [],
        poll_s=0.05,
    )
    for pid in cores:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("behavior", "times", "said"),
    [("no-boot", 2, "before it served, 2 times in a row; the end of"), ("unusable", 1, "it cannot use its settings")],
)
def test_a_producer_that_cannot_boot_is_tried_twice_and_never_again_with_settings_it_cannot_use(
    start, behavior, times, said
):
    run = start(producer_0=behavior)
    shown = run.output()
    assert run.process.returncode == 1 and len(run.times("producer-0 started")) == times
    assert said in shown and (behavior == "unusable" or "the engine reports another value" in shown)
    run.wait_for_end()
