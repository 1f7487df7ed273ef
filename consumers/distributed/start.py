"""The start of several ranks: by torchrun, or by the trainer itself on one machine."""

import hashlib
import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
import torch.distributed as dist

from penstock.consumers.distributed.watch import TRAINER_ENDS, Watch
from penstock.consumers.distributed.world import World
from penstock.consumers.learning.model.device import choose_device
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError, RunConfig

END_S = 15.0
"""How long the other ranks may take to end after the first; one that is frozen, or waits for the first, is killed."""
TICK_S = 0.05


def join(config: RunConfig, ending: str = TRAINER_ENDS) -> tuple[World, Watch]:
    """Returns the world of a process that torchrun has started, and the watch over its ranks. ending: as in `Watch`.

    Raises:
        ConfigError: no device for this rank.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = choose_device(config.trainer.device, local_rank)
    store, rank, size = next(dist.rendezvous("env://"))
    store = store_of_this_start(store, rank, size)
    timeout_s = config.trainer.rank_timeout_s
    world = World(store, rank, size, device, timeout_s, local_rank)
    watch = Watch(world, store, timeout_s, ending)
    return world, watch


def store_of_this_start(store: dist.Store, rank: int, size: int) -> dist.Store:
    """Returns a part of the store to which no earlier start of the ranks has written: torchrun keeps its store when it
    restarts them, and numbers the starts by machine.

    All ranks agree on it. Each publishes a new name and, repeatedly, the names it sees; they agree once all see the
    same: a rank that sees this rank's new name does not belong to an earlier start.
    """
    keys = [f"start/{name}/{number}" for name in ("own", "seen") for number in range(size)]
    store.set(keys[rank], uuid.uuid4().hex)
    while True:
        own = [store.get(key) for key in keys[:size]]
        seen = hashlib.sha256(b" ".join(own)).hexdigest()
        store.set(keys[size + rank], seen)
        if all(store.get(key).decode() == seen for key in keys[size:]):
            return dist.PrefixStore(seen, store)
        time.sleep(TICK_S)


def check_alike(config: RunConfig, ranks: Ranks) -> None:
    """Raises ConfigError, on every rank, if a rank's run file differs from the lead's."""
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


def launch(
    num_processes: int, command: Sequence[str], hand_to: Callable[[Callable[[], None]], None] = lambda stop: None
) -> int:
    """Runs a command line as `num_processes` ranks on this machine and waits for them to end; returns the first status,
    by rank, that is not 0, or 1 if every failed rank was killed by a signal.

    hand_to: receives the function that stops the ranks in order, by SIGTERM. The first rank that ends ends all; those
    that do not follow are killed, and their status does not count.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num_processes)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # no rank has to be a server
    ranks: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        for rank in ranks:
            rank.terminate()

    try:
        for number in range(num_processes):
            own = {"RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(subprocess.Popen(command, env={**os.environ, **shared, **own}))
        hand_to(stop)
        kill_at = math.inf
        while None in [rank.poll() for rank in ranks]:
            ended = [rank.returncode for rank in ranks if rank.returncode is not None]
            if ended and kill_at == math.inf:
                kill_at = time.monotonic() + END_S
                if any(ended):
                    stop()
            if time.monotonic() > kill_at:
                break
            time.sleep(TICK_S)
        codes = [rank.poll() or 0 for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    statuses = [0 if code == -signal.SIGTERM else code for code in codes]  # it had no handler yet: nothing has begun
    return next((status for status in statuses if status > 0), int(any(statuses)))
