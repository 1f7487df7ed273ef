"""A publisher and the producers of several hosts on one weight log, through a real server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import penstock.consumers.weights.publisher as publisher_module
import penstock.consumers.weights.shard as shard_module
import penstock.producers.weights.follower as follower_module
from publishing_trainer import PublishingTrainer, RandomWalkMasters
from waiting import until
from weight_host import HostProducer

pytestmark = pytest.mark.redis


class WeightRig:
    """A trainer that publishes, and producers whose engines compare the bits that they load."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.masters = RandomWalkMasters(0)
        self.trainer = PublishingTrainer(url, folder, self.masters)
        self.producers: list[HostProducer] = []

    def publish(self, density: float = 0.01) -> int:
        self.masters.walk(density)
        self.trainer.publish()
        self.trainer.settle()
        return self.trainer.version

    def join(self, host: str = "host") -> HostProducer:
        (self.folder / host).mkdir(exist_ok=True)
        self.producers.append(HostProducer(self.url, self.folder / host, self.trainer.keys, self.trainer.expected))
        return self.producers[-1]

    async def all_serve(self, version: int) -> None:
        await until(lambda: all(producer.serves(version) for producer in self.producers))
        assert not any(producer.engine.wrong for producer in self.producers)


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, monkeypatch) -> AsyncIterator[WeightRig]:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.01)
    monkeypatch.setattr(shard_module, "MAX_PIECE_BYTES", 1024)
    monkeypatch.setattr(shard_module, "MAX_CHUNK_BYTES", 2048)
    monkeypatch.setattr(follower_module, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(follower_module, "LONGEST_RETRY_S", 0.1)
    made = WeightRig(redis_url, tmp_path)
    yield made
    for producer in made.producers:
        await producer.leave()
    made.trainer.close()


async def test_producers_of_several_hosts_serve_what_was_published_while_it_goes_on(rig: WeightRig) -> None:
    rig.publish()
    for host in ("one", "one", "two", "two"):
        rig.join(host)
    for number in range(40):
        await asyncio.to_thread(rig.publish, 1.0 if number % 13 == 12 else 0.01)
    await rig.all_serve(rig.trainer.version)


async def test_a_host_whose_lock_files_were_removed_does_not_fall_into_two(rig: WeightRig) -> None:
    rig.publish()
    first, second = rig.join(), rig.join()
    await rig.all_serve(rig.publish())
    for name in ("users", "patch", "read"):
        (first.copy.folder / name).unlink()
    third = rig.join()
    await rig.all_serve(rig.publish())
    inodes = {(producer.copy.folder / "read").stat().st_ino for producer in (first, second, third)}
    assert len(inodes) == 1
    for producer in list(rig.producers):
        await producer.leave()
    assert not first.copy.folder.exists()
