"""A vLLM worker that breaks on request: its layers, for tests of the parity check, or its next load."""

import copy
import itertools
from typing import Any

from penstock.producers.engines.weight_transfer import EngineReport


class FaultyWorker(EngineReport):
    """Is mixed into vLLM's worker in place of EngineReport. Affects eager engines only: compiled graphs hold
    constants."""

    def penstock_break_load(self, rank: int) -> None:
        """Makes the next load of one rank fail halfway."""
        worker: Any = self
        model = worker.get_model()

        def load_weights(tensors: Any) -> None:
            del model.load_weights
            model.load_weights(itertools.islice(tensors, 9))
            raise OSError("the file ends here")

        if worker.rank == rank:
            model.load_weights = load_weights

    def penstock_break_rope(self, layer: int, factor: float) -> None:
        """Changes the base of one layer's rotary embedding."""
        worker: Any = self
        attention = worker.get_model().model.layers[layer].self_attn
        worker.penstock_replaced = (attention, "rotary_emb", attention.rotary_emb)
        rope = copy.deepcopy(attention.rotary_emb)
        rope.base *= factor
        rope.cos_sin_cache.copy_(rope._compute_cos_sin_cache())
        attention.rotary_emb = rope

    def penstock_break_norm(self, layer: int, name: str, epsilon: float) -> None:
        """Changes the epsilon of one layer's norm."""
        worker: Any = self
        norm = getattr(worker.get_model().model.layers[layer], name)
        worker.penstock_replaced = (norm, "variance_epsilon", norm.variance_epsilon)
        norm.variance_epsilon = epsilon

    def penstock_repair(self) -> None:
        """Restores the layer that was changed last."""
        worker: Any = self
        setattr(*worker.penstock_replaced)
