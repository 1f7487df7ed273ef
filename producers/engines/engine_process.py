"""vLLM's engine process: environment, start and shutdown."""

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

# vLLM reads its settings for logging when it is imported.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from penstock.producers.engines.parent_death import SOCKETS_PREFIX, SOCKETS_VARIABLE, children_bound
from penstock.producers.engines.settings import GENERATION_FILE, end_ids, engine_environment
from penstock.producers.engines.weight_transfer import BIND_VARIABLE
from penstock.producers.interfaces import EngineError
from penstock.schemas.config import RunConfig
from penstock.schemas.process.files import folder_for_sockets

LONGEST_BASE = 50
"""Characters of the folder in which that of the sockets is made: a socket's path may have 107, 55 of them are ours and
vLLM's."""
MULTIPROCESS_ARGUMENTS = {"distributed_executor_backend", "pipeline_parallel_size"}


@functools.cache
def socket_folder() -> str:
    """Makes a folder for the sockets of this process' engines, which vLLM would leave in TMPDIR. It is deleted when
    this process ends; if it is killed, by the engine's process.

    Raises:
        EngineError: TMPDIR is too long a path for a socket, and /tmp cannot be written.
    """
    try:
        folder = tempfile.mkdtemp(prefix=SOCKETS_PREFIX, dir=folder_for_sockets(LONGEST_BASE))
    except OSError as error:
        base = tempfile.gettempdir()
        raise EngineError(
            f"TMPDIR = {base!r}: {len(base)} characters, too long for a socket's path, and /tmp cannot be used "
            f"({error}); expected at most {LONGEST_BASE}"
        ) from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def set_environment(config: RunConfig) -> None:
    """Sets the environment variables that vLLM reads, here and in its engine process. Raises EngineError: see
    `socket_folder`."""
    os.environ[SOCKETS_VARIABLE] = socket_folder()
    os.environ[BIND_VARIABLE] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # These bypass every logger: C++ warnings, and the resource tracker's about a killed engine's semaphores.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    if config.lora is not None:
        # It warns about every adapter that its own tokenizer would not be used.
        logging.getLogger("vllm.v1.engine.input_processor").setLevel(logging.ERROR)
    os.environ.update(engine_environment(config, cpu=current_platform.is_cpu()))
    if current_platform.is_cpu():
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        # Its cached artifact does not load on CPU: each boot would warn and compile again.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


@contextlib.contextmanager
def ends_alone(model: str) -> Iterator[dict[str, str]]:
    """Yields vLLM's argument for the model's end-of-sequence ids alone, in place of its whole generation_config.json:
    vLLM reads no other setting of it, and would refuse the model for one that transformers refuses."""
    ends = end_ids(model)
    if ends is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        (Path(folder) / GENERATION_FILE).write_text(json.dumps({"eos_token_id": ends} if ends else {}), "utf-8")
        yield {"generation_config": folder}


async def boot(arguments: dict[str, Any]) -> AsyncLLM:
    """Builds the engine in a thread, so that signals are handled meanwhile. Cancelling kills the processes it started.

    Raises:
        EngineError: vLLM does not start.
    """
    is_alone = arguments["tensor_parallel_size"] == 1 and not MULTIPROCESS_ARGUMENTS & set(arguments)
    if current_platform.is_cpu() and is_alone:
        # On CPU vLLM runs the worker in a separate process, which costs a small model a third of its throughput.
        arguments = arguments | {"distributed_executor_backend": UniProcExecutor}
    booting: Future[AsyncLLM] = Future()

    def build() -> None:
        try:
            with children_bound():
                booting.set_result(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))
        except BaseException as error:
            booting.set_exception(error)

    before = set(multiprocessing.active_children())
    Thread(target=build, name="vllm-boot", daemon=True).start()
    try:
        wrapped = asyncio.wrap_future(booting)
        # Marks the exception of a cancelled boot as retrieved.
        wrapped.add_done_callback(lambda future: future.cancelled() or future.exception())
        return await asyncio.shield(wrapped)
    except asyncio.CancelledError:
        while not booting.done():
            for child in set(multiprocessing.active_children()) - before:
                child.kill()
            await asyncio.sleep(0.05)
        if booting.exception() is None:
            await shut_down(booting.result())
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM does not start on model.path = {arguments['model']!r}: {error}; see its log"
        ) from error


async def shut_down(llm: AsyncLLM) -> None:
    """Kills the engine process, which has nothing to save; its own shutdown keeps a core busy for seconds."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()
    llm.output_processor.propagate_error(EngineDeadError())
    # They warn about a process that had to be killed, which is intended.
    for name in ("vllm.v1.utils", "vllm.utils.system_utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    resources: Any = llm.engine_core.resources
    await asyncio.to_thread(llm.shutdown, timeout=0)
    for process in resources.engine_manager.processes:
        await asyncio.to_thread(process.join, 5)
    resources.ctx.destroy(linger=0)
    # AsyncLLM shuts down again when it is garbage-collected, by then without the modules it needs.
    llm.shutdown = lambda timeout=None: None  # type: ignore[method-assign]
