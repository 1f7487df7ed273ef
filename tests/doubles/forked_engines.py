"""Forks engine processes from a server process that has imported vLLM, which saves half of a boot."""

import contextlib
import importlib
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

from penstock.producers.engines.parent_death import set_parent_death_signal
from penstock.schemas.process import logs

PRELOADED = [
    "penstock.producers.engines.vllm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]


class EngineProcess(ForkServerProcess):
    """A process with this process's environment, which ends with it and with the process that forks it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin_engine, (type(self), dict(os.environ), os.getpid()), self.__dict__


def begin(kind: type[BaseProcess], environment: dict[str, str]) -> BaseProcess:
    """Unpickles the process where it was forked: sets its environment, and ends it with its server."""
    os.environ.clear()
    os.environ.update(environment)
    set_parent_death_signal(os.getppid())
    return kind.__new__(kind)


def _begin_engine(kind: type[BaseProcess], environment: dict[str, str], asker: int) -> BaseProcess:
    process = begin(kind, environment)
    threading.Thread(target=_end_with, args=(os.pidfd_open(asker),), name="asker-death", daemon=True).start()
    if path := environment.get("ENGINE_LOG"):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
    logs.inherit("engine")
    # An engine of several ranks forks them from itself.
    multiproc_executor: Any = importlib.import_module("vllm.v1.executor.multiproc_executor")
    multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    return process


def _end_with(process: int) -> None:
    """Waits for the end of a pidfd's process, which would be the parent without the fork; then kills this group."""
    select.select([process], [], [])
    os.killpg(os.getpgrp(), signal.SIGKILL)


class _Context(ForkServerContext):
    Process = EngineProcess  # type: ignore[assignment]


def patched() -> Any:
    """Returns a patch: while it is active, engines are forked from the server of this process."""
    return mock.patch("vllm.v1.engine.utils.get_mp_context", _Context)


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Forks the engines that are started meanwhile; the server ends with this process."""
    _Context().set_forkserver_preload(PRELOADED)
    with patched():
        yield
