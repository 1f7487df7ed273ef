"""Publisher and producers on one weight log, through a real server, with faults in between: what is served under a
version is bit for bit what was published as it, and what was harmed is mended."""

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
    """A trainer that publishes, and producers of hosts."""

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
        """Another trainer goes on from an older policy; the one before is gone without a word."""
        before = self.trainer
        for name, tensor in before.expected[parent].items():
            self.masters.weights[name].copy_(tensor)
        self.trainers.append(PublishingTrainer(self.url, self.folder, self.masters, before.epoch + 1, after=before))
        self.trainer.parent = parent
        self.trainer.publish()
        self.trainer.settle()
        return self.trainer.version

    def die_before_announcing(self) -> None:
        """The trainer's chunks of the next policy are written, its manifest is not."""
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

    def harm_chunk(self, version: int, harm: str) -> None:
        """Harms the first chunk of a delta."""
        key = f"{version}-delta-0-0"
        data = self.client.hget(self.keys.chunks, key)
        assert data is not None
        if harm == "missing":
            self.client.hdel(self.keys.chunks, key)
        else:
            flipped = data[:9] + bytes([data[9] ^ 4]) + data[10:]
            self.client.hset(self.keys.chunks, key, data[:-3] if harm == "cut short" else flipped)


@pytest.fixture
async def bench(redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch) -> AsyncIterator[WeightRig]:
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


async def test_producers_of_several_hosts_serve_what_was_published_while_it_goes_on(bench: WeightRig) -> None:
    bench.publish()
    for host in ("one", "one", "two", "two"):
        bench.join(host)
    for number in range(40):
        await asyncio.to_thread(bench.publish, 1.0 if number % 13 == 12 else 0.01)
    await bench.all_serve(bench.trainer.version)


@pytest.mark.parametrize("harm", ["missing", "flipped", "cut short"])
async def test_a_chunk_that_is_lost_or_wrong_holds_the_old_policy_until_the_trainer_has_looked(
    bench: WeightRig, harm: str
) -> None:
    bench.publish()
    staying = bench.join()
    old = bench.publish()
    await bench.all_serve(old)
    await staying.leave()  # away while the chunk is harmed
    bench.producers.clear()
    newest = bench.publish()
    bench.harm_chunk(newest, harm)
    joining = bench.join()
    await until(lambda: joining.weights.num_failed > 1)
    assert f"{newest}-delta-0-0" in joining.weights.last_error
    bench.trainer.publisher.announce_again(thoroughly=True)
    await bench.all_serve(newest)
    await bench.all_serve(bench.publish())


@pytest.mark.parametrize("harm", ["torn", "overwritten", "stateless", "cut short", "removed"])
@pytest.mark.parametrize("who", ["next version", "joining"])
async def test_a_copy_that_is_harmed_is_built_anew_for_whoever_comes_next(
    bench: WeightRig, harm: str, who: str
) -> None:
    bench.publish()
    bench.join()
    await bench.all_serve(bench.publish())
    corrupt_copy(bench.producers[0].copy.folder, harm)
    if who == "joining":
        bench.join()
    else:
        bench.publish()
    await bench.all_serve(bench.trainer.version)
    bench.join()
    await bench.all_serve(bench.publish())
    folders = {producer.copy.folder for producer in bench.producers}
    assert len(folders) == 1 and (folders.pop() / "state").exists()


async def test_a_host_whose_lock_files_were_removed_does_not_fall_into_two(bench: WeightRig) -> None:
    bench.publish()
    first, second = bench.join(), bench.join()
    await bench.all_serve(bench.publish())
    for name in ("users", "patch", "read"):
        (first.copy.folder / name).unlink()
    third = bench.join()
    await bench.all_serve(bench.publish())
    inodes = {(producer.copy.folder / "read").stat().st_ino for producer in (first, second, third)}
    assert len(inodes) == 1
    for producer in list(bench.producers):
        await producer.leave()
    assert not first.copy.folder.exists()


@pytest.mark.parametrize("lost", ["anchors", "chunks", "policy"])
async def test_what_redis_has_lost_is_there_again_for_who_joins(bench: WeightRig, lost: str) -> None:
    bench.publish()
    bench.join("one")
    for _ in range(3):
        newest = bench.publish()
    await bench.all_serve(newest)
    bench.client.delete(getattr(bench.keys, lost))
    bench.trainer.publisher.announce_again(thoroughly=True)
    bench.trainer.settle()
    bench.join("two")
    await bench.all_serve(newest)
    await bench.all_serve(bench.publish())


async def test_an_emptied_redis_gets_the_newest_policy_again(bench: WeightRig) -> None:
    bench.publish()
    bench.join("one")
    await bench.all_serve(bench.publish())
    bench.client.flushall()
    bench.trainer.publisher.announce_again()
    bench.trainer.settle()
    bench.join("two")
    await bench.all_serve(bench.trainer.version)
    await bench.all_serve(bench.publish())


async def test_chunks_of_a_policy_never_announced_are_gone_and_the_fork_is_served(bench: WeightRig) -> None:
    bench.publish()
    bench.join("one")
    for _ in range(4):
        newest = bench.publish()
    await bench.all_serve(newest)
    bench.die_before_announcing()
    assert bench.trainer.chunks(bench.client) > bench.trainer.named()
    bench.join("two")
    await bench.all_serve(newest)
    fork = bench.resume(newest - 2)
    assert bench.trainer.chunks(bench.client) == bench.trainer.named()
    await bench.all_serve(fork)
    await bench.all_serve(bench.publish())
