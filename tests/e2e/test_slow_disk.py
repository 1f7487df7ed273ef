"""A server on a disk that syncs slowly, killed during a sync: what it loses is repeated, and nothing is trained
twice."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import penstock.consumers.__main__ as entry
from penstock.consumers.stream.connection import SOCKET_TIMEOUT_S
from penstock.producers.stream import connection as producer_connection
from producer_thread import ProducerThread, VariedTasks
from real_server import RealServer
from scripted_learner import ScriptedLearner
from slow_disk import SlowDisk
from trainer_bench import TrainerBench, assert_settled_once, at_step, tracebacks
from waiting import wait_for

pytestmark = [pytest.mark.redis, pytest.mark.slow]

SYNC_S = {"everysec": 1.5, "always": 0.1}


class SlowDiskRun:
    """A server on a slow disk, a whole producer, and a trainer with a scripted learner."""

    def __init__(self, server: RealServer, disk: SlowDisk, folder: Path, *, may_forget: bool) -> None:
        self.server = server
        self.may_forget = may_forget
        self.disk = disk
        self.bench = TrainerBench(server.url, folder)
        self.producer = ProducerThread(self.bench.config, server.url, folder, tasks=VariedTasks())
        self.forgotten: list[bool] = []
        """For each kill, whether a confirmed write was lost."""

    def kill_in_a_sync(self) -> None:
        with redis.Redis.from_url(self.server.url, protocol=2, socket_timeout=30) as client:
            for attempt in range(10 if self.may_forget else 1):  # on a busy machine the kill may come after the sync
                answered = f"{len(self.forgotten)}-{attempt}"
                self.disk.wait_for_sync()
                client.set("answered", answered)
                self.server.stop()
                self.server.start()
                if is_forgotten := client.get("answered") != answered.encode():
                    break
            self.forgotten.append(is_forgotten)

    def assert_settled_once(self) -> None:
        assert self.producer.problem is None
        assert_settled_once(self.bench, self.server.client)

    def close(self) -> None:
        self.disk.take(0.0)
        self.producer.finish()
        self.bench.close()


@pytest.fixture(params=["everysec", "always"])
def fsync(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def disk(tmp_path: Path) -> SlowDisk:
    folder = tmp_path / "disk"
    folder.mkdir()
    return SlowDisk(folder)


@pytest.fixture
def server(server_binary: Path, disk: SlowDisk, fsync: str) -> Iterator[RealServer]:
    server = RealServer(server_binary, "--appendfsync", fsync, environment=disk.environment)
    server.client.set("written", 1)
    try:
        if fsync == "always" and not disk.count("ended"):
            pytest.skip(f"{server_binary} loads no LD_PRELOAD (linked statically?), so its disk cannot be slowed down")
        yield server
    finally:
        disk.take(0.0)
        server.remove()


@pytest.fixture
def scene(server: RealServer, disk: SlowDisk, fsync: str, tmp_path: Path, monkeypatch, caplog) -> Iterator[SlowDiskRun]:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
    scene = SlowDiskRun(server, disk, tmp_path, may_forget=fsync == "everysec")
    yield scene
    scene.close()


def test_a_server_killed_in_the_middle_of_slow_syncs_costs_work_and_nothing_else(scene, fsync, caplog):
    scene.disk.take(SYNC_S[fsync])
    trainer = scene.bench.trainer()
    for step in (2, 5, 9):
        at_step(trainer, step, scene.kill_in_a_sync)
    scene.producer.start()
    assert trainer.run()
    scene.producer.finish()
    scene.assert_settled_once()
    assert scene.forgotten == [fsync == "everysec"] * 3, "under everysec, what is written during a sync is in no file"
    assert "redis is another process now" in caplog.text
    assert not tracebacks(caplog)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fsync", ["always"], indirect=True)
def test_a_sync_that_takes_longer_than_an_answer_may_is_waited_out(scene, fsync, caplog):
    trainer = scene.bench.trainer()
    client = redis.Redis.from_url(scene.server.url, protocol=2, socket_timeout=60)
    stalling = threading.Thread(target=client.set, args=("stall", 1))
    took = producer_connection.ANSWER_S + 2.5
    assert took > SOCKET_TIMEOUT_S + 2

    def stall() -> None:
        scene.disk.take(took)
        stalling.start()
        # Waits for a delayed sync, not the next to begin: one in progress may have read its time before.
        wait_for(lambda: scene.disk.count("slow") > 0)
        scene.disk.take(0.0)

    at_step(trainer, 5, stall)
    scene.producer.start()
    assert trainer.run()
    scene.producer.finish()
    scene.assert_settled_once()
    stalling.join()
    client.close()
    outages = [text for text in caplog.messages if "is away" in text]
    assert len(outages) == 2, "one of the producer, which waits for an answer, and one of the trainer's socket"
    assert sum(f"is away (no answer in {producer_connection.ANSWER_S:.0f} s)" in text for text in outages) == 1
    assert len([text for text in caplog.messages if "is back" in text]) == 2
    assert not tracebacks(caplog)
