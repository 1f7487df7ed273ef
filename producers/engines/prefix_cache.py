"""vLLM plug-in, loaded in every engine process: forgets cached prefixes without waiting for an idle engine."""

from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.engine.core import EngineCore

FORGET_PREFIXES = "penstock_forget_prefixes"


def install() -> None:
    """Adds `FORGET_PREFIXES` to what the front end may ask of an engine."""
    setattr(EngineCore, FORGET_PREFIXES, _forget_prefixes)


def _forget_prefixes(core: Any) -> None:
    """No request finds KV from now on that was computed before; those in flight keep what they hold.

    vLLM's own reset refuses while a block is in use. A salt per policy does not do alone: a request that was salted
    before an update, and is prefilled after it, would find the older policy's KV under its label.
    """
    pool = core.scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = BlockHashToBlockMap()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()
