"""Publishes masters that tests move at random, and checks what readers of the weight log get."""

from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path

import redis
import torch
from safetensors.torch import load_file

from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import Scripts
from penstock.consumers.weights.publisher import Publication, Publisher
from penstock.consumers.weights.shard import PolicyShard
from penstock.consumers.weights.writer import WeightPlaces
from penstock.schemas.keys import Keys
from penstock.schemas.policy import make_version
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import REDIS
from weight_host import are_bits

SHAPES = {"embedding": (97, 16), "layer": (64, 33), "norm": (33,), "scale": ()}
Weights = dict[str, torch.Tensor]


class RandomWalkMasters:
    """Float32 masters of a few tensors, published in bfloat16; `norm` in float32."""

    def __init__(self, seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        self._draw = torch.Generator().manual_seed(seed)
        self.weights = {name: torch.randn(shape, generator=self._draw) for name, shape in shapes.items()}
        self.before_update: Callable[[], None] = lambda: None
        """Called before the masters change, as the learner's: waits for the snapshot."""

    def walk(self, density: float, size: float = 1e-2) -> None:
        """Changes this share of the elements at random."""
        self.before_update()
        for tensor in self.weights.values():
            hit = torch.rand(tensor.shape, generator=self._draw) < density
            tensor += hit * size * torch.randn(tensor.shape, generator=self._draw)

    def parts(self) -> Callable[[], list[PublishedPart]]:
        return lambda: [
            PublishedPart(name, _dtype(name), tuple(tensor.shape), 0, tensor.reshape(-1))
            for name, tensor in self.weights.items()
        ]

    def published(self) -> Weights:
        return {name: tensor.to(_dtype(name), copy=True) for name, tensor in self.weights.items()}


class PublishingTrainer:
    """The publishing part of one trainer, in one epoch. expected: the weights published, by version."""

    def __init__(
        self,
        url: str,
        folder: Path,
        masters: RandomWalkMasters,
        epoch: int = 0,
        *,
        deltas: str = REDIS,
        anchors: str | None = None,
        redis_bytes: int = 1 << 29,
        keep: int = 8,
        after: "PublishingTrainer | None" = None,
        pinned: Callable[[], Collection[int]] = frozenset,
        num_kept: int = 2,
    ) -> None:
        self.keys = Keys("test")
        self.connection = TrainerConnection(url, outage_s=5)
        self.scripts = Scripts(self.connection, self.keys, lambda: self.scripts.restore(0, {}))
        self.scripts.open_epoch(epoch)
        self.masters, self.epoch = masters, epoch
        self.parent = after.version if after is not None else -1
        self.version = make_version(epoch, 0)
        self.expected: dict[int, Weights] = {} if after is None else after.expected
        self.publications: list[Publication] = []
        self.shard = PolicyShard(Ranks(), self.keys, self.connection.call, lambda: masters.parts(), num_kept)
        self.publisher = Publisher(
            self.scripts,
            self.shard,
            Ranks(),
            WeightPlaces(deltas, anchors, str(folder / "own"), redis_bytes),
            keep,
            self.publications.append,
            pinned=pinned,
        )
        masters.before_update = self.publisher.wait_for_snapshot
        self.reader = WeightReader(self.connection.call, self.keys)
        self._file = folder / "policy.safetensors"
        self._is_first = True

    def publish(self, steps: int = 1) -> None:
        """Publishes the masters as they are; the first time as the epoch's first policy."""
        parent = self.parent if self._is_first else self.version
        self.version += 0 if self._is_first else steps
        self.expected[self.version] = self.masters.published()
        self.publisher.publish(self.version, parent, fork=self._is_first and self.epoch > 0)
        self._is_first = False

    def settle(self) -> None:
        """Waits until everything that the last publication caused is done."""
        self.publisher.wait()
        is_over: Future[None] = Future()
        self.publisher._worker.give(lambda: is_over.set_result(None))
        is_over.result(60)
        self.publisher.wait()

    def versions(self) -> list[int]:
        return sorted(self.reader.log().announced)

    def check(self, version: int) -> None:
        """Checks that a reader gets the bits that were published."""
        self.reader.write(self.reader.log().chain(version), self._file)
        assert are_bits(load_file(self._file), self.expected[version]), f"policy {version}"

    def chunks(self, client: redis.Redis) -> set[str]:
        """Returns the keys of the chunks in Redis."""
        return {key.decode() for key in client.hkeys(self.keys.chunks)}

    def named(self) -> set[str]:
        """Returns the keys of the chunks that the log names."""
        log = self.reader.log()
        return {chunk.key for known in (log.announced, log.anchors) for each in known.values() for chunk in each.chunks}

    def close(self) -> None:
        self.publisher.end()
        self.connection.close()


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "norm" else torch.bfloat16
