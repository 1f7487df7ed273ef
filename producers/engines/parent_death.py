"""A parent-death signal for child processes: each is killed when the process that started it ends.

A multiprocessing child outlives a killed parent, and one that is still booting would wait for it for ever. Linux's own
signal, `prctl(PR_SET_PDEATHSIG)`, is sent when the *thread* that created the child ends, which may be long before its
process does. So each child watches its parent from the beginning.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.schemas.process import logs

SOCKETS_VARIABLE = "VLLM_RPC_BASE_PATH"
SOCKETS_PREFIX = "penstock-engine-"
"""Of the folder that a parent makes for its engine's sockets."""
CHECK_S = 0.25
"""How often a child checks for its parent."""


class BoundSpawnProcess(SpawnProcess):
    def __reduce__(self) -> tuple[Any, ...]:
        # In the child, `_rebuild` runs before the rest is unpickled, which imports vLLM and takes seconds. Only the
        # import of the main module comes earlier, and it ends by itself.
        return _rebuild, (os.getpid(), type(self)), self.__dict__


class BoundForkProcess(ForkProcess):
    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        set_parent_death_signal(self._parent_pid)  # type: ignore[attr-defined]
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc]


_BOUND: dict[str, type[BaseProcess]] = {"spawn": BoundSpawnProcess, "fork": BoundForkProcess}


def set_parent_death_signal(parent: int) -> None:
    """Kills this process, and what it starts in its group, when the process `parent` ends.

    The process gets its own session, so that Ctrl-C reaches the parent alone, which ends its children in order.
    """
    if os.getpgrp() != os.getpid():
        os.setsid()
    threading.Thread(target=_watch, args=(parent,), name="parent-death", daemon=True).start()


def bind_children() -> None:
    """Gives each process that multiprocessing starts from now on, by spawn or by fork, a parent-death signal."""
    for method, bound in _BOUND.items():
        multiprocessing.get_context(method).Process = bound  # type: ignore[attr-defined]


@contextlib.contextmanager
def children_bound() -> Iterator[None]:
    """Gives each process that multiprocessing starts inside the block a parent-death signal."""
    bind_children()
    try:
        yield
    finally:
        for method in _BOUND:
            vars(multiprocessing.get_context(method)).pop("Process", None)


def _watch(parent: int) -> None:
    """Waits for the parent to end, which gives this process another parent; then deletes its folder of sockets and
    kills the group."""
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    sockets = os.environ.get(SOCKETS_VARIABLE, "")
    if os.path.basename(sockets).startswith(SOCKETS_PREFIX):
        shutil.rmtree(sockets, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _rebuild(parent: int, kind: type[BaseProcess]) -> BaseProcess:
    set_parent_death_signal(parent)
    logs.inherit("engine")
    return kind.__new__(kind)
