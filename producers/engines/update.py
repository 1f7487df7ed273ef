"""vLLM plug-in, loaded in every engine process: updates the weights in flight by one call of the engine core, and hands
over the experts of what is sampled.

vLLM's own API needs five calls to pause, load, label and resume, and on a busy machine nothing is sampled while each
waits for its turn.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCore

from penstock.producers.engines.routes import CAPTURE_ROUTES, RouteOutputs

UPDATE = "penstock_update"
TRY = "penstock_try"
"""The worker's method that calls another one and returns its error instead of raising it."""


def install() -> None:
    """Adds the utility calls `UPDATE` and `CAPTURE_ROUTES` to vLLM's engine core."""
    setattr(EngineCore, UPDATE, _update)
    setattr(EngineCore, CAPTURE_ROUTES, _capture_routes)


def _capture_routes(core: Any) -> None:
    """Hands over every request's experts from now on. Raises RuntimeError: the model has none."""
    results_of(core.model_executor.collective_rpc(TRY, args=(CAPTURE_ROUTES,)))
    core.scheduler.aux_output_connector = RouteOutputs()


def _update(core: Any, paths: list[str], version: str, forget_prefixes: bool, drained: bool) -> Future[Any]:
    """Loads the files `paths` while nothing is sampled, and labels what is sampled from then on with `version`.

    Requests in flight keep their KV; with `drained` the load waits for them to end, and the cache is cleared. After a
    failure sampling stays paused, with a mixture of weights, until another load succeeds.

    Returns:
        The future of the seconds during which no token was sampled, without the wait for requests to end, and of the
        number of restarted prompts.
    """
    done: Future[Any] = Future()
    load = partial(_load, core, paths, version, forget_prefixes, drained, done)

    def load_when_idle(idle: Future[Any]) -> None:
        if (failure := idle.exception()) is not None:
            done.set_exception(failure)
            return
        load()
        # The core is about to wait for a call, as an idle one does, and has requests again.
        core.input_queue.put_nowait((EngineCoreRequestType.ABORT, []))

    pausing = core.pause_scheduler("wait" if drained else "keep", drained)
    if pausing is None:
        load()
    else:
        pausing.add_done_callback(load_when_idle)
    return done


def _load(core: Any, paths: list[str], version: str, forget_prefixes: bool, drained: bool, done: Future[Any]) -> None:
    began = time.perf_counter()
    try:
        restarted = 0 if drained else _drop_stale_kv(core.scheduler, forget_prefixes)
        results_of(core.model_executor.collective_rpc(TRY, args=("penstock_load", paths)))
        # What an older vision tower has made of an image must not serve a new request.
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()
        core.set_weight_version(version)
        core.resume_scheduler()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result((time.perf_counter() - began, restarted))


def results_of(replies: Sequence[tuple[Any, str | None]]) -> list[Any]:
    """Returns the result of every rank of a call through `TRY`.

    Raises:
        RuntimeError: names the ranks that failed, and with what.
    """
    several = len(replies) > 1
    failures = [f"rank {rank}: " * several + error for rank, (_, error) in enumerate(replies) if error is not None]
    if failures:
        raise RuntimeError("; ".join(failures))
    return [result for result, _ in replies]


def _drop_stale_kv(scheduler: Any, forget_prefixes: bool) -> int:
    """Drops KV that would be used under the new label; returns the number of restarted prompts. Requests that have
    sampled keep theirs.

    A prompt of which only some chunks are computed is restarted: all its tokens would bear the new policy's label, with
    a part of their context computed by the old one. With `forget_prefixes`, no later request finds KV that was computed
    before. vLLM's own reset refuses while a block is in use, and a salt per policy is not enough: a request that was
    salted before an update and is prefilled after it would find the older policy's KV.
    """
    if forget_prefixes:
        _forget_prefixes(scheduler.kv_cache_manager.block_pool)
    unfinished = [request for request in scheduler.running if request.is_prefill_chunk]
    for request in reversed(unfinished):  # each goes to the front of the waiting queue
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # As vLLM's own reset does: a worker keeps its state of a request unless that was absent for a step.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return len(unfinished)


def _forget_prefixes(pool: Any) -> None:
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
