"""Engine processes forked from a server process that has imported vLLM, which is half of what a boot takes."""

import contextlib
import importlib
import multiprocessing
import os
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
    """Has this process's environment, and the parent-death signal of the process that forks it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _begin_engine, (type(self), dict(os.environ)), self.__dict__


def begin(kind: type[BaseProcess], environment: dict[str, str]) -> BaseProcess:
    """The process, unpickled where it was forked: with this environment, and bound to the life of its server."""
    os.environ.clear()
    os.environ.update(environment)
    set_parent_death_signal(os.getppid())
    return kind.__new__(kind)


def _begin_engine(kind: type[BaseProcess], environment: dict[str, str]) -> BaseProcess:
    process = begin(kind, environment)
    logs.inherit("engine")
    # The ranks of an engine of several are forked from it in turn.
    multiproc_executor: Any = importlib.import_module("vllm.v1.executor.multiproc_executor")
    multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    return process


class _Context(ForkServerContext):
    Process = EngineProcess  # type: ignore[assignment]


def patched() -> Any:
    """A patch: engines that are started meanwhile are forked from the server of this process."""
    return mock.patch("vllm.v1.engine.utils.get_mp_context", _Context)


@contextlib.contextmanager
def forked_engines() -> Iterator[None]:
    """Engines that are started meanwhile are forked; the server ends with this process."""
    _Context().set_forkserver_preload(PRELOADED)
    with patched():
        yield
