"""Several ranks: torch.distributed behind the interface that the numerics use."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from penstock.consumers.learning.ranks import Ranks, Thread, Value

FOREVER = timedelta(days=365)
"""The time-out of a rank that waits for an order, which may take long: the trainer waits for rollouts, and `Watch`
notices a lost lead. The lead waits no longer than `timeout_s` for a rank to take an order."""
WAITING = "waiting for orders"


class World(Ranks):
    """The ranks of a process group.

    store: how they find each other. device: the device whose type holds the shards.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, local_rank: int = 0
    ) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=self._timeout)
        self.mesh = init_device_mesh(device.type, (size,))
        self.group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._orders = dist.new_group(backend="gloo", timeout=self._timeout if self.is_lead else FOREVER)
        self._neighbours: dict[int, dist.ProcessGroup] = {}
        self._threads: dict[Thread, Ranks] = {
            "checkpoint": _ThreadRanks(self, dist.new_group(backend="gloo", timeout=self._timeout)),
            "publisher": _ThreadRanks(
                self, dist.new_group(backend="gloo", timeout=self._timeout if self.is_lead else FOREVER)
            ),
        }

    def order(self, name: str, part: Callable[[int], tuple[Any, ...]] = lambda rank: ()) -> None:
        self.phase = name
        orders = [None, *((name, part(rank)) for rank in range(1, self.size))]
        dist.scatter_object_list([None], orders, group=self._orders)

    def follow(self, orders: Mapping[str, Callable[..., object]]) -> None:
        while True:
            self.phase = WAITING
            received: list[Any] = [None]
            dist.scatter_object_list(received, group=self._orders)
            name, part = received[0]
            self.phase = name
            orders[name](*part)

    def hand_out(self, part: Callable[[int], Value]) -> Value:
        received: list[Any] = [None]
        parts = [part(rank) for rank in range(self.size)] if self.is_lead else None
        dist.scatter_object_list(received, parts, group=self.group)
        found: Value = received[0]
        return found

    def gather(self, value: Value) -> list[Value]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def neighbours(self, size: int) -> dist.ProcessGroup:
        if size not in self._neighbours:
            self._neighbours[size] = dist.new_subgroups(size, timeout=self._timeout)[0]
        return self._neighbours[size]

    def add(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.group)
        return values

    @property
    def thread_phases(self) -> str:
        return ", ".join(each.phase for each in self._threads.values() if each.phase)

    def for_thread(self, thread: Thread) -> Ranks:
        return self._threads[thread]


class _ThreadRanks(World):
    """A world's ranks for one thread, with a process group of its own."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.local_rank = world.rank, world.size, world.local_rank
        self.mesh, self.group, self.phase = world.mesh, group, ""
