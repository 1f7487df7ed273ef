"""vLLM plug-in, loaded in every engine process: before an update, drops KV that would be used under the new label."""

import time
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.engine.core import EngineCore

DROP_STALE_KV = "penstock_drop_stale_kv"


def install() -> None:
    """Adds the utility call `DROP_STALE_KV` to vLLM's engine core."""
    setattr(EngineCore, DROP_STALE_KV, _drop_stale_kv)


def _drop_stale_kv(core: Any, forget_prefixes: bool) -> int:
    """Called while sampling is paused; returns the number of restarted prompts. Requests that have sampled keep
    their KV.

    A prompt of which only some chunks are computed is restarted: all its tokens would bear the new policy's label, with
    a part of their context computed by the old one. With `forget_prefixes`, no later request finds KV that was computed
    before. vLLM's own reset refuses while a block is in use, and a salt per policy is not enough: a request that was
    salted before an update and is prefilled after it would find the older policy's KV.
    """
    if forget_prefixes:
        _forget_prefixes(core.scheduler.kv_cache_manager.block_pool)
    return _restart_prefills(core.scheduler)


def _restart_prefills(scheduler: Any) -> int:
    partial = [request for request in scheduler.running if request.is_prefill_chunk]
    for request in reversed(partial):  # each goes to the front of the waiting queue
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        # As vLLM's own reset does: a worker keeps its state of a request unless that was absent for a step.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return len(partial)


def _forget_prefixes(pool: Any) -> None:
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
