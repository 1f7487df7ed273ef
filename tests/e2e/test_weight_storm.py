"""Hundreds of policies: random walks, forks, skipped versions, several hosts, and faults of all kinds in between. A
host that holds a version holds the bits that were published under it, and the log keeps nothing that no producer can
need."""

import math
import random
from pathlib import Path

import pytest
import redis
import torch

import penstock.consumers.weights.kept as kept_module
import penstock.consumers.weights.publisher as publisher_module
import penstock.consumers.weights.shard as shard_module
from penstock.consumers.weights.shard import Task
from penstock.producers.interfaces import WeightLoadError
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.weights.host_copy import HostCopy
from penstock.schemas.weights.log import read_log
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import FolderChunks
from publishing_trainer import PublishingTrainer, RandomWalkMasters
from weight_host import are_bits, corrupt_copy, read

pytestmark = pytest.mark.redis

KEEP = 5
CHAIN = 40
CHUNK_CORRUPTIONS = ("missing", "flipped", "cut short")
COPY_CORRUPTIONS = ("torn", "overwritten", "stateless", "cut short", "removed")


class WeightStorm:
    """One trainer at a time, and the copies of two hosts with two producers each."""

    def __init__(self, url: str, client: redis.Redis, folder: Path, seed: int, deltas: str, anchors: str) -> None:
        self.url, self.client, self.folder = url, client, folder
        self.draw = random.Random(seed)
        self.masters = RandomWalkMasters(seed)
        self.places = {"deltas": deltas, "anchors": anchors, "keep": KEEP}
        self.trainer = PublishingTrainer(url, folder, self.masters, **self.places)
        self.keys = self.trainer.keys
        self.checkpoints: dict[int, dict[str, torch.Tensor]] = {}
        self.copies: list[HostCopy] = []
        self.num_held = 0
        self.refused = 0
        for host in ("one", "two"):
            (folder / host).mkdir()
            self.copies += [self.join(host), self.join(host)]

    def join(self, host: str) -> HostCopy:
        reader = WeightReader(lambda command: command(self.client), self.keys)
        copy = HostCopy(str(self.folder / host), "test", "redis", reader, ProducerMetrics())
        copy.open()
        return copy

    def publish(self) -> None:
        self.trainer.publish(steps=self.draw.choice([1, 1, 1, 4]))
        self.trainer.settle()
        if self.draw.random() < 0.1:
            weights = {name: tensor.clone() for name, tensor in self.masters.weights.items()}
            self.checkpoints[self.trainer.version] = weights

    def resume(self, *, torn: bool) -> None:
        """Ends the trainer, between chunks and manifest if `torn`, and starts another one from any checkpoint."""
        before = self.trainer
        if torn:
            next_one = before.version + 1
            before.shard.snapshots.begin(next_one)
            before.shard.write(Task(next_one, before.version, False, self.places["deltas"], math.inf, 10**6))
        before.connection.close()
        parent = self.draw.choice(sorted(self.checkpoints))
        for name, tensor in self.checkpoints[parent].items():
            self.masters.weights[name].copy_(tensor)
        self.trainer = PublishingTrainer(
            self.url, self.folder, self.masters, before.epoch + 1, after=before, **self.places
        )
        self.trainer.parent = parent
        self.publish()
        assert self.stored() <= self.trainer.named()

    def corrupt_chunk(self) -> None:
        """Corrupts any chunk, in Redis or in a folder."""
        how, key = self.draw.choice(CHUNK_CORRUPTIONS), self.draw.choice(sorted(self.stored()))
        stores = [self.trainer.shard.store(place) for place in (self.places["deltas"], self.places["anchors"])]
        store = next(store for store in stores if key in set(store.keys()))
        data = store.get(key)
        store.delete([key])
        if how == "flipped":
            at = self.draw.randrange(len(data))
            store.put(key, data[:at] + bytes([data[at] ^ 1 << self.draw.randrange(8)]) + data[at + 1 :])
        elif how == "cut short":
            store.put(key, data[: self.draw.randrange(len(data))])

    def lose(self) -> None:
        """Deletes what Redis may lose; then the trainer checks the log."""
        what = self.draw.choice(["all", self.keys.anchors, self.keys.policy, self.keys.chunks])
        self.client.flushall() if what == "all" else self.client.delete(what)
        self.trainer.publisher.announce_again()
        self.trainer.settle()

    def corrupt_copy(self) -> None:
        copy = self.draw.choice(self.copies)
        if (copy.folder / "read").exists() and copy.path.exists():
            how = self.draw.choice(COPY_CORRUPTIONS)
            corrupt_copy(copy.folder, how)
            if how == "overwritten":  # detected at the next patch, or by a producer that joins
                for number, other in enumerate(self.copies):
                    if other.folder == copy.folder:
                        other._is_verified = False
                        self.copies[number] = other

    def come_and_go(self) -> None:
        number = self.draw.randrange(len(self.copies))
        host = self.copies[number].folder.parent.name
        self.copies[number].close()
        self.copies[number] = self.join(host)

    def hold(self, copy: HostCopy) -> bool:
        """Moves a copy to the newest policy; returns False if that is refused."""
        log = read_log(self.client, self.keys)
        wanted = log.announced[max(log.announced)]
        try:
            manifest = copy.lock_at(wanted)
        except (WeightLoadError, OSError):
            self.refused += 1
            return False
        assert manifest.version == self.trainer.version
        assert are_bits(read(copy.path), self.trainer.expected[manifest.version]), manifest.version
        copy.release()
        self.num_held += 1
        return True

    def all_hold(self) -> None:
        """Checks that all copies reach the newest policy, at the latest after the trainer has checked the log."""
        if not self.do_all_hold():
            self.trainer.publisher._compared = -1
            self.trainer.publisher.announce_again(thoroughly=True)
            self.trainer.settle()
            assert self.do_all_hold()

    def do_all_hold(self) -> bool:
        found = [self.hold(copy) for copy in self.copies]
        return all(found)

    def stored(self) -> set[str]:
        found = self.trainer.chunks(self.client)
        for place in (self.places["deltas"], self.places["anchors"]):
            if place != "redis":
                found |= set(FolderChunks(Path(place)).keys())
        return found

    def check_size(self) -> None:
        """Checks that the log holds the last versions, the anchor before them, those in between, and no other chunk."""
        log = self.trainer.reader.log()
        assert self.stored() <= self.trainer.named()
        assert len(log.announced) <= KEEP + CHAIN + 1
        assert len(log.anchors) <= KEEP + 2
        manifests = [*log.announced.values(), *log.anchors.values()]
        whole = max(each.chunk_bytes for each in manifests if each.delta_of is None)
        deltas = sum(each.chunk_bytes for each in log.announced.values() if each.delta_of is not None)
        assert deltas <= (KEEP + 3) * whole / 2

    def close(self) -> None:
        for copy in self.copies:
            copy.close()
        self.trainer.close()


@pytest.mark.parametrize("server_binary", ["redis"], indirect=True)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (0, 2, 3, 4, 5))])
def test_a_storm_of_faults_never_shows_other_bits_and_leaves_nothing_behind(
    seed: int, redis_url: str, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "RETRY_S", 0.01)
    monkeypatch.setattr(kept_module, "LONGEST_CHAIN", CHAIN)
    monkeypatch.setattr(shard_module, "MAX_PIECE_BYTES", 1024)
    monkeypatch.setattr(shard_module, "MAX_CHUNK_BYTES", 2048)
    deltas = str(tmp_path / "deltas") if seed % 3 == 2 else "redis"
    anchors = str(tmp_path / "anchors") if seed % 3 else "redis"
    storm = WeightStorm(redis_url, redis_client, tmp_path, seed, deltas, anchors)
    draw = storm.draw
    storm.publish()
    storm.checkpoints[storm.trainer.version] = {n: t.clone() for n, t in storm.masters.weights.items()}
    for number in range(400):
        if draw.random() < 0.02:
            storm.resume(torn=draw.random() < 0.5)
        is_quiet = number % 100 > 50  # a long chain of small deltas
        storm.masters.walk(draw.choice([0.0, 0.0003]) if is_quiet else draw.choice([0.0, 0.001, 0.01, 0.01, 0.1, 0.6]))
        storm.publish()
        for fault, share in ((storm.corrupt_copy, 0.08), (storm.come_and_go, 0.1), (storm.corrupt_chunk, 0.03)):
            if draw.random() < share:
                fault()
        if draw.random() < 0.02:
            storm.lose()
        if draw.random() < 0.3:
            storm.hold(draw.choice(storm.copies))
        if draw.random() < 0.1:
            storm.all_hold()
            storm.check_size()
    storm.all_hold()
    storm.check_size()
    storm.close()
    assert storm.num_held > 200
    assert not list(tmp_path.glob("*/penstock-*"))
