"""Puts the policy's adapter into vLLM's own LoRA layers, in vLLM's processes: one adapter, which every request uses."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name

ADAPTER_ID = 1
ADAPTER_NAME = "policy"
_MOST_NAMED = 3


def load_adapter(model: Any, tensors: Mapping[str, Tensor], scaling: float) -> None:
    """Writes an adapter into the buffers that `model` computes with. Nothing may be sampled meanwhile.

    tensors: by peft's names; none leave the base model alone.

    Raises:
        ValueError: the adapter has half of a layer, or layers that vLLM's model lacks or does not adapt. The buffers
            are unchanged.
    """
    manager = model.lora_manager
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    factors: dict[str, dict[bool, Tensor]] = {}
    for name, tensor in tensors.items():
        module, is_first = parse_fine_tuned_lora_name(name, mapper and mapper.get_rename_mapper())
        factors.setdefault(module, {})[is_first] = tensor
    if not factors:
        _replace(manager, manager.create_dummy_lora(ADAPTER_ID, 1, {}))  # zeros
        return
    served = {*manager.modules, *(part for parts in manager.packed_modules.values() for part in parts)}
    if unknown := sorted(factors.keys() - served):
        raise ValueError(
            f"adapter: vLLM's {type(model).__name__} has no LoRA layer for {unknown[:_MOST_NAMED]}; expected "
            "lora.targets among those that it adapts"
        )
    if halves := [module for module, both in factors.items() if len(both) != 2]:
        raise ValueError(f"adapter: one factor alone of {halves[:_MOST_NAMED]}, expected lora_A and lora_B")
    layers = {
        # Clones: vLLM keeps them, and the file that they are mapped from will change.
        module: LoRALayerWeights(module, len(both[True]), 1, both[True].clone(), both[False] * scaling, scaling=1)
        for module, both in factors.items()
    }
    _replace(manager, LoRAModel(ADAPTER_ID, manager.lora_config.max_lora_rank, layers))


def _replace(manager: Any, adapter: LoRAModel) -> None:
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)  # copied into the only slot, in place
