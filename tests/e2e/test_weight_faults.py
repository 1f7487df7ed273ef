"""A publisher and producers on one weight log, through a real server, with faults: what is served under a version is
bit for bit what was published under it, and what was corrupted is repaired."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

import penstock.consumers.weights.publisher as publisher_module
import penstock.consumers.weights.shard as shard_module
import penstock.producers.weights.follower as follower_module
from penstock.consumers.weights.shard import Task
from penstock.schemas.weights.stores import REDIS
from publishing_trainer import PublishingTrainer, RandomWalkMasters
from waiting import until
from weight_host import HostProducer, corrupt_copy

pytestmark = pytest.mark.redis


class WeightRig:
    """A trainer that publishes, and producers on several hosts."""

    def __init__(self, url: str, folder: Path, client: redis.Redis) -> None:
        self.url, self.folder, self.client = url, folder, client
        self.masters = RandomWalkMasters(0)
        self.trainers = [PublishingTrainer(url, folder, self.masters)]
        self.producers: list[HostProducer] = []

    @property
    def trainer(self) -> PublishingTrainer:
        return self.trainers[-1]

    @property
    def keys(self):
        return self.trainer.keys

    def publish(self, density: float = 0.01) -> int:
        self.masters.walk(density)
        self.trainer.publish()
        self.trainer.settle()
        return self.trainer.version

    def resume(self, parent: int) -> int:
        """Starts another trainer from an older policy; the one before ends without shutdown."""
        before = self.trainer
        for name, tensor in before.expected[parent].items():
            self.masters.weights[name].copy_(tensor)
        self.trainers.append(PublishingTrainer(self.url, self.folder, self.masters, before.epoch + 1, after=before))
        self.trainer.parent = parent
        self.trainer.publish()
        self.trainer.settle()
        return self.trainer.version

    def die_before_announcing(self) -> None:
        """Writes the chunks of the next policy without its manifest."""
        version = self.trainer.version + 1
        self.masters.walk(0.02)
        self.trainer.shard.snapshots.begin(version)
        written = self.trainer.shard.write(Task(version, self.trainer.version, False, REDIS, math.inf, 10**6))
        assert written.failure is None and written.chunks

    def join(self, host: str = "host") -> HostProducer:
        (self.folder / host).mkdir(exist_ok=True)
        self.producers.append(HostProducer(self.url, self.folder / host, self.keys, self.trainer.expected))
        return self.producers[-1]

    async def all_serve(self, version: int) -> None:
        await until(lambda: all(producer.serves(version) for producer in self.producers))
        assert not any(producer.engine.wrong for producer in self.producers)

    def corrupt_chunk(self, version: int, how: str) -> None:
        """Corrupts the first chunk of a delta."""
        key = f"{version}-delta-0-0"
        data = self.client.hget(self.keys.chunks, key)
        assert data is not None
        if how == "missing":
            self.client.hdel(self.keys.chunks, key)
        else:
            flipped = data[:9] + bytes([data[9] ^ 4]) + data[10:]
            self.client.hset(self.keys.chunks, key, data[:-3] if how == "cut short" else flipped)


@pytest.fixture
async def rig(redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch) -> AsyncIterator[WeightRig]:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.01)
    monkeypatch.setattr(shard_module, "MAX_PIECE_BYTES", 1024)
    monkeypatch.setattr(shard_module, "MAX_CHUNK_BYTES", 2048)
    monkeypatch.setattr(follower_module, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(follower_module, "LONGEST_RETRY_S", 0.1)
    made = WeightRig(redis_url, tmp_path, redis_client)
    yield made
    for producer in made.producers:
        await producer.leave()
    for trainer in made.trainers:
        trainer.close()


async def test_producers_of_several_hosts_serve_what_was_published_while_it_goes_on(rig: WeightRig) -> None:
    rig.publish()
    for host in ("one", "one", "two", "two"):
        rig.join(host)
    for number in range(40):
        await asyncio.to_thread(rig.publish, 1.0 if number % 13 == 12 else 0.01)
    await rig.all_serve(rig.trainer.version)


async def test_a_chunk_that_is_lost_or_wrong_holds_the_old_policy_until_the_trainer_has_looked(rig: WeightRig) -> None:
    rig.publish()
    for how in ("missing", "flipped", "cut short"):
        staying = rig.join()
        await rig.all_serve(rig.publish())
        await staying.leave()  # absent while the chunk is corrupted
        rig.producers.clear()
        newest = rig.publish()
        rig.corrupt_chunk(newest, how)
        joining = rig.join()
        await until(lambda at=joining: at.weights.num_failed > 1)
        assert f"{newest}-delta-0-0" in joining.weights.last_error, how
        rig.trainer.publisher.announce_again(thoroughly=True)
        await rig.all_serve(newest)
        await rig.all_serve(rig.publish())


@pytest.mark.parametrize("who", ["next version", "joining"])
async def test_a_corrupted_copy_is_rebuilt_for_the_next_producer_that_needs_it(rig: WeightRig, who: str) -> None:
    rig.publish()
    rig.join()
    for how in ("torn", "overwritten", "stateless", "cut short", "removed"):
        await rig.all_serve(rig.publish())
        corrupt_copy(rig.producers[0].copy.folder, how)
        if who == "joining":
            rig.join()
        else:
            rig.publish()
        await rig.all_serve(rig.trainer.version)
    rig.join()
    await rig.all_serve(rig.publish())
    folders = {producer.copy.folder for producer in rig.producers}
    assert len(folders) == 1 and (folders.pop() / "state").exists()


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


async def test_what_redis_has_lost_is_there_again_for_who_joins(rig: WeightRig) -> None:
    rig.publish()
    rig.join("one")
    for lost in ("anchors", "chunks", "policy", "everything"):
        for _ in range(3):
            newest = rig.publish()
        await rig.all_serve(newest)
        rig.client.flushall() if lost == "everything" else rig.client.delete(getattr(rig.keys, lost))
        rig.trainer.publisher.announce_again(thoroughly=lost != "everything")
        rig.trainer.settle()
        rig.join("two")
        await rig.all_serve(newest)
        await rig.all_serve(rig.publish())


async def test_chunks_of_a_policy_never_announced_are_gone_and_the_fork_is_served(rig: WeightRig) -> None:
    rig.publish()
    rig.join("one")
    for _ in range(4):
        newest = rig.publish()
    await rig.all_serve(newest)
    rig.die_before_announcing()
    assert rig.trainer.chunks(rig.client) > rig.trainer.named()
    rig.join("two")
    await rig.all_serve(newest)
    fork = rig.resume(newest - 2)
    assert rig.trainer.chunks(rig.client) == rig.trainer.named()
    await rig.all_serve(fork)
    await rig.all_serve(rig.publish())
