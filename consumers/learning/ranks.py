"""The ranks of a trainer: what the numerics know of the other processes."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")
Thread = Literal["checkpoint", "publisher"]
"""The threads other than the main one that communicate."""

BETWEEN_STEPS = "between steps"
"""The lead's phase while it does work in which the other ranks have no part."""


class Ranks:
    """The processes that train one model together, each on its device; here a world of one.

    Several are a `consumers.distributed.world.World`. All methods are collective: every rank calls them, in the same
    order, or waits until the time-out of the ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank's number among those on its machine."""
    mesh: DeviceMesh | None = None
    """The devices that share the parameters; None in a world of one, whose parameters are whole."""
    group: dist.ProcessGroup | None = None
    """The ranks' group for objects and tensors on CPU; None in a world of one."""
    phase: str = "start"
    """The work this rank is doing, for the message about a rank that is lost."""

    @property
    def thread_phases(self) -> str:
        """The phases of the other threads; empty if they have nothing to do."""
        return ""

    @property
    def is_lead(self) -> bool:
        """True of rank 0, which alone talks to Redis and holds durable state."""
        return self.rank == 0

    def order(self, name: str, part: Callable[[int], tuple[Any, ...]] = lambda rank: ()) -> None:
        """Starts the function of this name, with its part as arguments, on the other ranks, which wait in `follow`. For
        the lead only."""

    def follow(self, orders: Mapping[str, Callable[..., object]]) -> None:
        """Waits for the lead's orders and carries them out until the lead ends. Called by every other rank."""
        raise NotImplementedError("there is no lead to follow in a world of one")

    def hand_out(self, part: Callable[[int], Value]) -> Value:
        """Returns this rank's part. `part` is called on the lead only, once for each rank."""
        return part(0)

    def gather(self, value: Value) -> list[Value]:
        """Returns every rank's value, by rank, on all ranks. Tensors must be on CPU."""
        return [value]

    def neighbours(self, size: int) -> dist.ProcessGroup:
        """Returns the group of the `size` consecutive ranks among which this one is; its tensors are on the ranks'
        devices."""
        raise NotImplementedError("a world of one has no neighbours")

    def add(self, values: Tensor) -> Tensor:
        """Returns the sum over the ranks, on all of them, of tensors of one shape and type."""
        return values

    def for_thread(self, thread: Thread) -> "Ranks":
        """Returns the same ranks for another thread, whose calls do not mix with the main thread's. Their `phase` is
        empty while the thread has nothing to do."""
        return Ranks()
