"""Which producers boot beside each other, by a pool whose processes are stand-ins."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.deploy.launch import producer_pool
from penstock.deploy.launch.producer_pool import PartDied, ProducerPool, boots_at_once
from penstock.schemas.config import ProducersConfig


class Pool:
    """A pool of `count`, its children told when to serve and to die."""

    def __init__(self, count: int, boots_at_once: int) -> None:
        self.children: dict[str, Any] = {}
        self._heartbeats: dict[str, Any] = {}
        self.states: dict[str, str] = {}
        config = SimpleNamespace(producers=ProducersConfig())
        view: Any = SimpleNamespace(state=self.states.__setitem__, config=config)
        self.pool = ProducerPool(count, boots_at_once, self._start, view)

    def _start(self, name: str) -> Any:
        pid = len(self._heartbeats) + 100
        self.children[name] = SimpleNamespace(name=name, pid=pid, status=None, log=Path(name), started_s=2e9)
        self.children[name].poll = lambda child=self.children[name]: child.status
        self.children[name].last_error = lambda: "it is quarantined: 0.3 nats"
        self.children[name].end = lambda child=self.children[name]: setattr(child, "status", -9)
        self.children[name].kill = self.children[name].end
        self.children[name].last_lines = lambda: "compiling"
        return self.children[name]

    def tick(self) -> list[str]:
        """The producers that this tick starts."""
        before = dict(self.children)
        self.pool.tick(self._heartbeats, finished=lambda: False)
        return [name for name, child in self.children.items() if before.get(name) is not child]

    def serve(self, name: str) -> None:
        self._heartbeats[name] = SimpleNamespace(pid=self.children[name].pid)


def test_as_many_boot_beside_each_other_as_may_and_the_next_takes_the_place_of_one_that_serves():
    pool = Pool(3, boots_at_once=2)
    assert pool.tick() == ["producer-0", "producer-1"]
    assert pool.tick() == [] and not pool.pool.is_settled
    pool.serve("producer-1")
    assert pool.tick() == ["producer-2"]
    assert pool.pool.is_settled  # the trainer may boot beside the last ones


def test_one_at_a_time_the_trainer_waits_for_the_last_producer():
    pool = Pool(2, boots_at_once=1)
    for name in ("producer-0", "producer-1"):
        assert pool.tick() == [name]
        assert not pool.pool.is_settled
        pool.serve(name)
    assert pool.tick() == [] and pool.pool.is_settled


def test_a_producer_that_still_boots_when_the_run_ends_is_said_to_be_just_that():
    pool = Pool(2, boots_at_once=2)
    pool.tick()
    pool.serve("producer-0")
    pool.tick()
    pool.pool.kill_booting()
    assert pool.children["producer-0"].status is None and pool.children["producer-1"].status == -9
    assert pool.states == {"producer-0": "ready", "producer-1": "stopped before it served: the run ends"}


def test_a_producer_that_did_not_boot_beside_another_is_tried_again_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(producer_pool.time, "monotonic", lambda: now[0])
    pool = Pool(2, boots_at_once=2)
    pool.tick()
    pool.children["producer-0"].status = 1
    now[0] += 5.0
    assert pool.tick() == []
    now[0] += 5.0
    assert pool.tick() == []
    pool.serve("producer-1")
    assert pool.tick() == ["producer-0"]


def test_a_producer_that_boots_for_too_long_is_not_said_to_be_killed_by_someone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(producer_pool.time, "monotonic", lambda: now[0])
    pool = Pool(1, boots_at_once=1)
    for later in (0.0, 1801.0, 0.0):  # it starts, is ended, and is found to have ended
        now[0] += later
        pool.tick()
    assert pool.states["producer-0"].startswith("was ended after 30 minutes of booting, starting again in 1 s")
    for later in (2.0, 1801.0):
        now[0] += later
        pool.tick()
    with pytest.raises(PartDied, match="ended after 30 minutes of booting before it served, 2 times in a row"):
        pool.tick()


def test_a_producer_that_ends_while_it_serves_is_told_with_its_reason_and_who_takes_its_groups():
    pool = Pool(1, boots_at_once=1)
    pool.tick()
    pool.serve("producer-0")
    pool.tick()
    pool.children["producer-0"].status = 1
    pool.tick()
    assert pool.states["producer-0"] == (
        "ended with status 1, starting again in 1 s; it is quarantined: 0.3 nats; others take its groups over within "
        "30 s; log: producer-0"
    )


def test_engines_boot_side_by_side_as_far_as_their_threads_have_cores(monkeypatch):
    for num_cores, num_threads, expected in ((1, 1, 1), (2, 1, 2), (8, 4, 2), (2, 8, 1)):
        cores = set(range(num_cores))
        monkeypatch.setattr(producer_pool.os, "sched_getaffinity", lambda pid, cores=cores: cores, raising=False)
        assert boots_at_once(ProducersConfig(num_threads=num_threads)) == expected, (num_cores, num_threads)
