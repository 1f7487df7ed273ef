"""The reasons for which a run cannot go on are told in one line each, with what helps: on a real server."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from penstock.deploy.launch import progress, standstill
from penstock.deploy.launch.child import Child
from penstock.deploy.launch.progress import Progress
from penstock.deploy.launch.redis_server import RedisServer, connect
from penstock.deploy.launch.standstill import Standstill
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.heartbeat import encode_heartbeat
from penstock.schemas.keys import Commit, Keys
from penstock.schemas.producer_parity import ProducerParity, encode_parity
from run_lines import update_line, write_lines
from waiting import wait_for
from wire_examples import heartbeat

pytestmark = pytest.mark.redis

CONFIG = RunConfig(name="r", num_updates=5, model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B"))
KEYS = Keys("r")
PRODUCERS = ("producer-0", "producer-1")


class Watched:
    """A run's folder, its server and its processes, looked at once a second of a clock that jumps."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binary: Path) -> None:
        monkeypatch.delenv("REDIS_URL", raising=False)
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=time.time)
        monkeypatch.setattr(standstill, "time", clock)
        monkeypatch.setattr(progress, "time", clock)
        self.folder = tmp_path / "r"
        self.server = RedisServer(self.folder, maxmemory_mb=64, binary=binary)
        self.redis = self.server.client
        self.children = [self._start(name) for name in ("trainer", *PRODUCERS)]
        self.children.insert(0, self.server.child)
        self.progress = Progress(self.folder)
        self.seen = Standstill(CONFIG, tmp_path, self.redis, self.progress)

    def _start(self, name: str) -> Child:
        return Child(name, ["sleep", "600"], log=self.folder / "logs" / f"{name}.log")

    def connect_as(self, user: str, password: str) -> None:
        self.seen = Standstill(CONFIG, self.folder.parent, self._client(user, password), self.progress)

    def _client(self, user: str, password: str) -> redis.Redis:
        return connect(self.server.url.replace("unix://:", f"unix://{user}:").replace(self._password(), password))

    def _password(self) -> str:
        return self.server.url.removeprefix("unix://:").partition("@")[0]

    def beat(self, *names: str) -> None:
        for name in names:
            self.redis.set(KEYS.producer(name), encode_heartbeat(heartbeat(name, instance=f"of-{name}")))

    def reason(self, seconds: int = 5, num_booting: int = 0) -> str:
        for _ in range(seconds):
            self.now += 1.0
            self.seen.look(self.children, num_booting)
        return self.seen.reason

    def train(self, num_batches: int) -> None:
        """Appends the line of a batch, the last of `num_batches`."""
        write_lines(self.folder / "updates.jsonl", *(update_line(number + 1) for number in range(num_batches)))
        self.progress.poll()

    def suspend(self, *children: Child) -> str:
        """Returns the process ids."""
        for child in children:
            os.kill(child.pid, signal.SIGSTOP)
            wait_for(child.is_suspended)
        return " ".join(str(child.pid) for child in children)

    def close(self) -> None:
        for child in self.children:
            child.end()
        self.server.kill()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_binary: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path, monkeypatch, server_binary)
    yield watched
    watched.close()


def fail_to_save(run: Watched) -> None:
    """Saves into a file whose place a folder has, as on a disk that takes no more."""
    (run.server.folder / "dump.rdb").mkdir()
    run.redis.config_set("save", "3600 1000000")
    run.redis.bgsave()
    wait_for(lambda: run.redis.info("persistence")["rdb_last_bgsave_status"], lambda status: status == "err")


def forbid_writing(run: Watched) -> None:
    run.redis.execute_command("ACL", "SETUSER", "guest", "on", ">sesame", "~*", "+@read", "+info")
    run.connect_as("guest", "sesame")


Fault = Callable[[Watched], Any]
REFUSALS: dict[str, tuple[Fault, str, str]] = {
    "MISCONF": (fail_to_save, "refuses to write: MISCONF ", "; make room on its disk, and the run goes on"),
    "READONLY": (lambda run: run.redis.replicaof("127.0.0.1", 1), "refuses to write: You can't", "REPLICAOF NO ONE"),
    "NOREPLICAS": (
        lambda run: run.redis.config_set("min-replicas-to-write", 1),
        "refuses to write: NOREPLICAS ",
        "; start its replicas, or lower its min-replicas-to-write, and the run goes on; it ends after redis.outage_s =",
    ),
    "OOM": (lambda run: run.redis.config_set("maxmemory", 1000), "is full: 0 MB", "a larger redis.maxmemory_mb"),
    "NOPERM": (forbid_writing, "refuses this run: ", "; mend the user and password, and resume it"),
    "WRONGPASS": (lambda run: run.connect_as("", "other"), "refuses this run: invalid username-password", "resume it"),
    "suspended": (
        lambda run: run.suspend(run.server.child),
        "redis is suspended (SIGSTOP): `kill -CONT ",
        "` continues",
    ),
    "gone": (
        lambda run: run.server.child.end(),
        "the run's own Redis does not answer: ",
        "the run goes on once it does",
    ),
}


@pytest.mark.parametrize("answer", REFUSALS)
def test_a_redis_that_takes_no_writes_is_told_with_what_helps(run, answer):
    fault, said, helps = REFUSALS[answer]
    run.beat(*PRODUCERS)
    assert run.reason() == "" and run.seen.heartbeats.keys() == set(PRODUCERS)
    fault(run)
    assert run.reason(2) == "", "it has not held for long"
    reason = run.reason()
    assert said in reason and helps in reason and "\n" not in reason, reason


def test_a_reason_is_forgotten_once_it_is_over(run):
    run.beat(*PRODUCERS)
    run.redis.config_set("min-replicas-to-write", 1)
    assert run.reason() != ""
    run.redis.config_set("min-replicas-to-write", 0)
    assert run.reason(1) == ""


def test_a_folder_that_takes_nothing_is_told(run, monkeypatch):
    run.beat(*PRODUCERS)
    moved, disk = run.folder.with_name("moved"), os.statvfs(run.folder)
    run.folder.rename(moved)
    assert run.reason().startswith("the run's folder cannot be read: [Errno 2] No such file or directory: ")
    moved.rename(run.folder)
    assert run.reason(1) == ""

    def disk_with(**fields: int) -> None:
        values = {name: getattr(disk, name) for name in ("f_bavail", "f_frsize", "f_files", "f_favail")}
        monkeypatch.setattr(standstill.os, "statvfs", lambda folder: SimpleNamespace(**{**values, **fields}))

    disk_with(f_bavail=1, f_frsize=1_000_000)
    assert run.reason() == f"the disk of {run.folder} is full: 1 MB are free; make room, and the run goes on"
    disk_with(f_favail=0, f_files=100)
    assert "is full: it takes no more files (`df -i`); delete some" in run.reason()
    disk_with(f_files=0, f_favail=0)
    assert run.reason() == "", "a file system that does not count its files"
    monkeypatch.setattr(standstill.os, "access", lambda folder, mode: False)
    assert run.reason().startswith(f"{run.folder} cannot be written: it is read-only")


def test_producers_that_are_gone_quarantined_or_suspended_are_told(run):
    assert run.reason(200) == "", "none has served yet"
    run.beat(*PRODUCERS)
    assert run.reason() == ""
    finding = encode_parity(ProducerParity(producer_id="producer-1", quarantined_s=1.0, reason="0.3 nats, not 0.03"))
    run.redis.hset(KEYS.parity, "of-producer-1", finding)
    assert run.reason() == "", "the other one is trained from"
    run.redis.hset(KEYS.parity, "of-producer-0", finding)
    assert run.reason().startswith("every producer is quarantined: producer-1: 0.3 nats, not 0.03; repair its engine")
    run.redis.delete(*map(KEYS.producer, PRODUCERS))
    assert run.reason(num_booting=1) == "", "one is on its way"
    assert run.reason().startswith(f"no producer is alive: the logs are in {run.folder / 'logs'}; the run goes on once")
    pids = run.suspend(*run.children[2:])
    assert run.reason() == f"producer-0 and producer-1 are suspended (SIGSTOP): `kill -CONT {pids}` continues"


@pytest.mark.parametrize("num_batches", [5, 3])
def test_producers_that_end_after_the_last_update_or_an_early_end_are_not_told(run, num_batches):
    run.beat(*PRODUCERS)
    assert run.reason() == ""
    run.train(num_batches)
    if num_batches < CONFIG.num_updates:
        run.redis.hset(KEYS.commit, Commit.FINISHED, "1")
    run.redis.delete(*map(KEYS.producer, PRODUCERS))
    assert run.reason() == ""


def test_a_trainer_that_is_suspended_is_told(run):
    run.beat(*PRODUCERS)
    trainer = run.children[1]
    pid = run.suspend(trainer)
    assert run.reason() == f"trainer is suspended (SIGSTOP): `kill -CONT {pid}` continues"
    os.kill(trainer.pid, signal.SIGCONT)
    wait_for(trainer.is_suspended, lambda is_suspended: not is_suspended)
    assert run.reason(1) == ""


def test_a_trainer_that_trains_nothing_is_told_with_what_it_logged_last(run):
    trainer = run.children[1]
    run.beat(*PRODUCERS)
    assert run.reason(119) == "", "the first batch takes its time"
    told = f"no batch is trained: for {{}} s; {{}} (the trainer's log is {trainer.log})"
    assert run.reason(6) == told.format(124, f"process {trainer.pid} logs nothing")
    run.train(1)
    assert run.reason(34) == ""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S.123", time.gmtime())
    trainer.log.write_text(f"{stamp} INFO trainer v0 an older line\n{stamp} INFO trainer v1 waiting for index 7\n")
    run.train(2)
    assert run.reason(135) == "", "four times what the last batches took"
    assert run.reason(6) == told.format(141, "waiting for index 7")
    run.train(5)
    assert run.reason(60) == "", "it waits for the last evaluation"
    shutil.rmtree(run.folder / "logs")
    assert trainer.last_record(0.0) == ""
