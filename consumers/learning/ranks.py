"""The ranks of a trainer: what the numerics know of the processes beside their own."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Value = TypeVar("Value")
Thread = Literal["checkpoint", "publisher"]
"""The threads that communicate beside the main one."""

BETWEEN_STEPS = "between steps"
"""The lead's phase while it does what the other ranks have no part in."""


class Ranks:
    """The processes that train one model together, each on its device; here a world of one.

    Several are a `consumers.distributed.world.World`. All methods are collective: every rank calls them, in the same
    order, or waits until the time-out of the ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Its number among those on this machine."""
    mesh: DeviceMesh | None = None
    """The devices that share the parameters; None in a world of one, whose parameters are whole."""
    group: dist.ProcessGroup | None = None
    """The ranks' group for objects and tensors on CPU; None in a world of one."""
    phase: str = "start"
    """What this rank is at, for the message about a rank that is lost."""

    @property
    def phase_beside(self) -> str:
        """The same of the threads beside; empty if they have nothing to do."""
        return ""

    @property
    def is_lead(self) -> bool:
        """Rank 0 alone speaks to Redis and holds what is durable."""
        return self.rank == 0

    def order(self, name: str, part: Callable[[int], tuple[Any, ...]] = lambda rank: ()) -> None:
        """The lead's alone: the others, which wait in `follow`, call what they know by this name with their part."""

    def follow(self, orders: Mapping[str, Callable[..., object]]) -> None:
        """Waits for the orders of the lead and carries them out, until it ends. Called by every other rank."""
        raise NotImplementedError("there is no lead to follow in a world of one")

    def hand_out(self, part: Callable[[int], Value]) -> Value:
        """The part of this rank; asked for on the lead alone, for each rank."""
        return part(0)

    def gather(self, value: Value) -> list[Value]:
        """The value of each rank, by rank, on all of them. Tensors must be on CPU."""
        return [value]

    def add(self, values: Tensor) -> Tensor:
        """The sum over the ranks, on all of them; of tensors of one shape and type."""
        return values

    def beside(self, thread: Thread) -> "Ranks":
        """The same ranks for one thread beside the main one, whose calls do not mix with those of others. Its `phase`
        is empty while it has nothing to do."""
        return Ranks()
