"""Asynchronous scheduling on vLLM's CPU build, which implements it but switches it off."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any
from unittest import mock

from vllm.platforms.cpu import CpuPlatform

from penstock.producers.engines.weight_transfer import EngineReport

_check = CpuPlatform.check_and_update_config


def _check_and_keep(vllm_config: Any) -> None:
    wanted = vllm_config.scheduler_config.async_scheduling
    _check(vllm_config)
    vllm_config.scheduler_config.async_scheduling = wanted


@contextlib.contextmanager
def async_scheduling_kept() -> Iterator[None]:
    """Keeps the scheduling that is asked for in engines started meanwhile; their worker's extension must be
    AsyncWorker."""
    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(_check_and_keep)):
        yield


class AsyncWorker(EngineReport):
    """Is mixed into vLLM's worker in place of EngineReport."""


if multiprocessing.parent_process() is not None:  # in the engine's process, for its whole life
    CpuPlatform.check_and_update_config = staticmethod(_check_and_keep)  # type: ignore[method-assign]
