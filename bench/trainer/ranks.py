"""Measurements on several ranks: each rank is a process of its own on one torch thread."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from bench.section import start_apart
from penstock.consumers.distributed.world import World
from penstock.consumers.learning.ranks import Ranks
from penstock.deploy.launch.child import Child

TIMEOUT_S = 600.0


class RankJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one rank. store: the file through which the ranks meet; both are set by `start_ranks`."""

    num_ranks: int = 1
    rank: int = 0
    store: str = ""

    def open(self) -> Ranks:
        if self.num_ranks == 1:
            return Ranks()
        store = dist.FileStore(self.store, self.num_ranks)
        return World(store, self.rank, self.num_ranks, torch.device("cpu"), TIMEOUT_S)


def start_ranks(
    name: str, function: str, job: RankJob, folder: Path, *, environment: Mapping[str, str] | None = None
) -> list[Child]:
    """Starts a process for each rank; `found_apart(name, ...)` reads what the lead found."""
    store = folder / f"{name}.store"
    store.unlink(missing_ok=True)  # of an earlier round: its addresses are no longer in use
    return [
        start_apart(
            f"{name}, rank {rank}" if rank else name,
            function,
            msgspec.structs.replace(job, rank=rank, store=str(store)),
            folder,
            environment=environment,
        )
        for rank in range(job.num_ranks)
    ]
