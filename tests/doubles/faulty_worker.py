"""A vLLM worker whose layers can be changed on request, for tests of the parity check."""

import copy
from typing import Any

from penstock.producers.engines.weight_transfer import EngineReport


class FaultyWorker(EngineReport):
    """Mixed into vLLM's worker in place of EngineReport. Only an eager engine minds: compiled graphs hold constants."""

    def penstock_break_rope(self, layer: int, factor: float) -> None:
        """One layer's rotary embedding gets another base."""
        worker: Any = self
        attention = worker.get_model().model.layers[layer].self_attn
        worker._penstock_mend = (attention, "rotary_emb", attention.rotary_emb)
        rope = copy.deepcopy(attention.rotary_emb)
        rope.base *= factor
        rope.cos_sin_cache.copy_(rope._compute_cos_sin_cache())
        attention.rotary_emb = rope

    def penstock_break_norm(self, layer: int, name: str, epsilon: float) -> None:
        """One layer's norm gets another epsilon."""
        worker: Any = self
        norm = getattr(worker.get_model().model.layers[layer], name)
        worker._penstock_mend = (norm, "variance_epsilon", norm.variance_epsilon)
        norm.variance_epsilon = epsilon

    def penstock_mend(self) -> None:
        worker: Any = self
        setattr(*worker._penstock_mend)
