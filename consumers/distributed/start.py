"""The start of several ranks: by torchrun, or by the trainer itself on one machine."""

import logging
import os
import signal
import uuid
from collections.abc import Sequence

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from penstock.consumers.distributed.watch import TRAINER_ENDS, Watch
from penstock.consumers.distributed.world import World
from penstock.consumers.learning.device import choose_device
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError, RunConfig

STOP_S = 600
"""The time that the ranks have to end after a signal: the lead writes a checkpoint first."""


def join(config: RunConfig, ending: str = TRAINER_ENDS) -> tuple[World, Watch]:
    """The world of a process that torchrun has started, and the watch over its ranks. ending: as in `Watch`.

    Raises:
        ConfigError: no device for this rank.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = choose_device(config.trainer.device, local_rank)
    store, rank, size = next(dist.rendezvous("env://"))
    timeout_s = config.trainer.rank_timeout_s
    world = World(store, rank, size, device, timeout_s, local_rank)
    watch = Watch(world, store, timeout_s, ending)
    return world, watch


def check_alike(config: RunConfig, ranks: Ranks) -> None:
    """Raises ConfigError, on every rank, if one has another run file than the lead."""
    lead, *others = ranks.gather(_flat(msgspec.to_builtins(config)))
    for rank, other in enumerate(others, start=1):
        for name in lead | other:
            if lead.get(name) != other.get(name):
                raise ConfigError(
                    f"{name} = {other.get(name)!r} on rank {rank}, and {lead.get(name)!r} on rank 0: expected one run "
                    "file for all ranks"
                )


def _flat(fields: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in fields.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def launch(num_processes: int, command: Sequence[str]) -> int:
    """Runs a command line as so many ranks on this machine, and returns the status of the first that failed, 0 if none
    did, and 128 + the signal after one."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=STOP_S,
    )
    try:
        elastic_launch(settings, command[0])(*command[1:])
    except ChildFailedError as error:
        status: int = error.get_first_failure()[1].exitcode
        return status if status > 0 else 128 - status
    except SignalException as stopped:
        return 128 + signal.Signals(stopped.sigval)
    return 0
