"""A leash on child processes: they end with the process that started them, from their first moment on.

What multiprocessing starts does not end with a parent that is killed, and a child that still boots would wait for it
for good. PR_SET_PDEATHSIG does not do: it fires when the parent's *thread* ends that started the child.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.schemas.process import logs

LOOK_S = 0.25
"""An orphan lives so long at most."""


class BoundSpawnProcess(SpawnProcess):
    def __reduce__(self) -> tuple[Any, ...]:
        # In the child, `_on_leash` runs before the rest is unpickled, which imports vLLM and takes seconds. What comes
        # still earlier, the import of the main module, ends by itself.
        return _on_leash, (os.getpid(), type(self)), self.__dict__


class BoundForkProcess(ForkProcess):
    def _bootstrap(self, parent_sentinel: Any = None) -> int:
        hold(self._parent_pid)  # type: ignore[attr-defined]
        return super()._bootstrap(parent_sentinel)  # type: ignore[misc]


_LEASHED: dict[str, type[BaseProcess]] = {"spawn": BoundSpawnProcess, "fork": BoundForkProcess}


def hold(parent: int) -> None:
    """From now on this process and what it starts in its group end together with the process `parent`.

    A session of its own keeps a Ctrl-C at the terminal for the parent, which ends its children in order.
    """
    if os.getpgrp() != os.getpid():
        os.setsid()
    threading.Thread(target=_watch, args=(parent,), name="penstock-leash", daemon=True).start()


def leash_children() -> None:
    """Has each process that multiprocessing starts from now on, by spawn or by fork, hold to this one."""
    for method, leashed in _LEASHED.items():
        multiprocessing.get_context(method).Process = leashed  # type: ignore[attr-defined]


@contextlib.contextmanager
def children_leashed() -> Iterator[None]:
    """The same for the processes that are started meanwhile."""
    leash_children()
    try:
        yield
    finally:
        for method in _LEASHED:
            vars(multiprocessing.get_context(method)).pop("Process", None)


def _watch(parent: int) -> None:
    """Waits for the end of the parent, by which this process becomes another's child."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _on_leash(parent: int, kind: type[BaseProcess]) -> BaseProcess:
    hold(parent)
    logs.inherit("engine")
    return kind.__new__(kind)
