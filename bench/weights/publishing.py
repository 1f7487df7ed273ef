"""A trainer that only publishes.

Float32 masters of any size, of which a share changes between two policies, and in place of the next batch's forward and
backward passes matrix products on the main thread.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from penstock.consumers.learning.model.published import PublishedPart
from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.stream.connection import TrainerConnection
from penstock.consumers.stream.scripts import Scripts
from penstock.consumers.weights.publisher import Publisher
from penstock.consumers.weights.shard import PolicyShard
from penstock.consumers.weights.writer import WeightPlaces
from penstock.schemas.keys import Keys

TENSOR_ELEMENTS = 1 << 24
LOWEST_BIT = 1 << 16
"""Of bfloat16, in the bits of a float32."""
OUTAGE_S = 60.0
POLL_S = 0.001
WIDTH = 0.02


class PublishingJob(msgspec.Struct, frozen=True, kw_only=True):
    """num_bytes: of the policy in bfloat16. num_versions: after the first. folder: scratch on tmpfs.

    burn_s: of products between two policies. holders: producers that must hold a policy before the next is made.
    """

    url: str
    run: str
    num_bytes: int
    changed: float
    num_versions: int
    folder: str
    anchors: str | None = None
    burn_s: float = 0.0
    holders: int = 0


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """blocked_s: by version after the first, the waits for the snapshot before included. began_s: monotonic.

    copy_s: the policy's bytes copied once.
    """

    blocked_s: list[float]
    began_s: list[float]
    copy_s: float


class Masters:
    """Float32 weights as a learner has them."""

    def __init__(self, num_bytes: int) -> None:
        self._draw = torch.Generator().manual_seed(0)
        num_elements = num_bytes // 2
        sizes = [TENSOR_ELEMENTS] * (num_elements // TENSOR_ELEMENTS)
        if rest := num_elements % TENSOR_ELEMENTS:
            sizes.append(rest)
        # As a policy is published: without bits that bfloat16 has no room for.
        self.weights = [(torch.randn(size, generator=self._draw) * WIDTH).bfloat16().float() for size in sizes]

    def collect(self) -> Callable[[], list[PublishedPart]]:
        return lambda: [
            PublishedPart(f"layers.{n}.weight", torch.bfloat16, tuple(weight.shape), 0, weight)
            for n, weight in enumerate(self.weights)
        ]

    def change(self, share: float) -> None:
        """Changes this share of the elements by the smallest step of bfloat16."""
        for weight in self.weights:
            where = torch.randint(len(weight), (round(share * len(weight)),), generator=self._draw)
            weight.view(torch.int32)[where] ^= LOWEST_BIT


def publish(job: PublishingJob) -> Published:
    masters, keys = Masters(job.num_bytes), Keys(job.run)
    connection = TrainerConnection(job.url, OUTAGE_S)
    scripts = Scripts(connection, keys)
    scripts.open_epoch(0)
    shard = PolicyShard(Ranks(), keys, connection.call, masters.collect)
    places = WeightPlaces("redis", job.anchors, str(Path(job.folder) / "weights"), 4 << 30)
    publisher = Publisher(scripts, shard, Ranks(), places, 8)
    publisher.publish(0, -1)
    publisher.wait()
    _await_holders(connection, job, 0)
    publisher.take_blocked_s()
    product = torch.randn(512, 512)
    blocked_s, began_s = [], []
    for version in range(1, job.num_versions + 1):
        publisher.wait_for_snapshot()
        masters.change(job.changed)
        began_s.append(time.monotonic())
        publisher.publish(version, version - 1)
        until = time.monotonic() + job.burn_s
        while time.monotonic() < until:
            product @ product
        publisher.wait_for_snapshot()
        blocked_s.append(publisher.take_blocked_s())
        _await_holders(connection, job, version)
    publisher.wait()
    publisher.end()
    return Published(
        blocked_s=blocked_s,
        began_s=began_s,
        copy_s=_copy_s(job.num_bytes),
    )


def holders_key(run: str) -> str:
    """Hash: version to the number of producers that hold it."""
    return f"bench:{run}:holders"


def _await_holders(connection: TrainerConnection, job: PublishingJob, version: int) -> None:
    while int(connection.client.hget(holders_key(job.run), str(version)) or 0) < job.holders:
        time.sleep(POLL_S)


def _copy_s(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))
