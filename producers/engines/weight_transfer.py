"""vLLM plug-in, loaded in every engine process: loads policies, whole or adapters, from safetensors files; children
end with the process."""

import logging
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from penstock.producers.engines import adapter_products, cpu_build, update
from penstock.producers.engines.direct_writes import direct_writes
from penstock.producers.engines.hidden_states import HiddenStateCapture
from penstock.producers.engines.parent_death import bind_children
from penstock.producers.engines.routes import RouteCapture
from penstock.producers.engines.weight_files import read_tensors
from penstock.schemas.routes import row_bytes

BACKEND = "penstock_safetensors"
ADAPTER_ID = 1
ADAPTER_NAME = "policy"
"""The one adapter, which every request uses."""
_MOST_NAMED = 3
BIND_VARIABLE = "PENSTOCK_BIND_ENGINE"
"""Environment variable that gives the children of this process's engine processes a parent-death signal."""


@dataclass
class SafetensorsInitInfo(WeightTransferInitInfo):
    """Empty: both sides see the same file system."""


@dataclass
class SafetensorsUpdateInfo(WeightTransferUpdateInfo):
    """paths: files that together hold every parameter, by the checkpoint's names and shapes."""

    paths: list[str]


class SafetensorsTransferEngine(WeightTransferEngine[SafetensorsInitInfo, SafetensorsUpdateInfo]):
    """Loads a checkpoint from a file system that this process sees into the running model.

    A failed load leaves a mixture of old and new weights; nothing may be sampled until another load succeeds.
    """

    init_info_cls = SafetensorsInitInfo
    update_info_cls = SafetensorsUpdateInfo

    def init_transfer_engine(self, init_info: SafetensorsInitInfo) -> None:
        # It warns at every update about layers that have nothing to load: rotary embeddings, tied heads.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def start_weight_update(self) -> None:
        self._kernels = self._take_kernels()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        # The base class always synchronizes, which raises without an accelerator.
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: SafetensorsUpdateInfo) -> None:
        try:
            model: Any = self.model
            with direct_writes(model):
                model.load_weights(read_tensors(update_info.paths))
        except BaseException:
            self._abandon()
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels:
            if method.moe_kernel is None:  # its layer was not loaded
                method.moe_kernel = kernel
        self._pack_tied_heads()

    def shutdown(self) -> None:
        pass

    def _take_kernels(self) -> list[tuple[Any, Any]]:
        """Takes the kernels of the CPU build's experts away, and returns them with their methods.

        With a kernel in place vLLM copies an update's experts as they are over those that it packed for the kernel.
        """
        if self.device.type != "cpu":
            return []
        methods: list[Any] = [getattr(layer, "quant_method", None) for layer in self.model.modules()]
        taken = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
        for method, _ in taken:
            method.moe_kernel = None
        return taken

    def _abandon(self) -> None:
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # With nothing buffered, finalizing restores the layer's former tensors.
                info.loaded_weights.clear()
                info.load_numel = 0
        self.finish_weight_update()

    def _pack_tied_heads(self) -> None:
        """Repacks the copy that the CPU build keeps of a parameter that another layer owns.

        A head tied to the embedding loads nothing itself, so the reload leaves its packed copy at the old weights.
        """
        owners: dict[int, torch.nn.Module] = {}
        layer: Any
        for layer in self.model.modules():
            weight = layer._parameters.get("weight")
            if weight is None or not weight.numel():
                continue
            owner = owners.setdefault(weight.data_ptr(), layer)
            if owner is not layer and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)


class EngineReport(HiddenStateCapture, RouteCapture):
    """Mixed into vLLM's worker: the methods that Penstock calls on every rank of the running engine."""

    def penstock_try(self, method: str, *arguments: Any) -> tuple[Any, str | None]:
        """Calls a method of this worker; returns its result and None, or None and its error.

        vLLM itself raises the first rank's error while later ranks still work, and the next call would take their
        unread replies for its own.
        """
        try:
            return getattr(self, method)(*arguments), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def penstock_unlink_memory(self) -> None:
        """Unlinks the memory that the CPU build's ranks share, which killed processes would leave in /dev/shm. Call it
        once all ranks have opened the memory."""
        if ranks := os.environ.get("VLLM_DIST_IDENT"):
            for shared in Path("/dev/shm").glob(f"{ranks}-*"):
                shared.unlink(missing_ok=True)

    def penstock_adapt(self, scaling: float) -> None:
        """Makes every policy an adapter from now on, with this scaling factor; the first one is empty."""
        worker: Any = self
        worker._penstock_scaling = scaling
        self.penstock_load([])

    def penstock_load(self, paths: list[str]) -> None:
        """Loads this rank's part of the safetensors files `paths`."""
        worker: Any = self
        scaling: float | None = getattr(worker, "_penstock_scaling", None)
        if scaling is not None:
            # vLLM's own update session would drop the adapter at its end, as one of another base model.
            load_adapter(worker.get_model(), dict(read_tensors(paths)), scaling)
            if worker.device.type != "cpu":
                torch.accelerator.synchronize(worker.device)
            return
        worker.start_weight_update()
        worker.update_weights({"paths": paths})
        worker.finish_weight_update()

    def penstock_report(self) -> dict[str, Any]:
        """Returns the plain settings of this process by vLLM's names, and the dtypes of model and sampler."""
        worker: Any = self
        config = worker.vllm_config
        report: dict[str, Any] = {}
        for section in (config.parallel_config, config.cache_config, config.scheduler_config, config.model_config):
            for name, value in vars(section).items():
                if value is None or isinstance(value, bool | int | float | str):
                    report[name] = value
        head_dtype = getattr(getattr(worker.get_model(), "logits_processor", None), "head_dtype", None)
        sampler = getattr(worker.model_runner, "sampler", None)
        if (lora := config.lora_config) is not None:
            report |= {"max_loras": lora.max_loras, "max_lora_rank": lora.max_lora_rank}
        model = config.model_config
        shape = model.get_total_num_hidden_layers(), model.get_num_experts(), model.get_num_experts_per_tok()
        return report | {
            "route_bytes": row_bytes(*shape),
            "enable_lora": config.lora_config is not None,
            "device": worker.device.type,
            "dtype": _name(config.model_config.dtype),
            "head_dtype": _name(head_dtype or config.model_config.head_dtype),
            "logprobs_mode": str(getattr(sampler, "logprobs_mode", config.model_config.logprobs_mode)),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "num_threads": torch.get_num_threads(),
        }


def load_adapter(model: Any, tensors: Mapping[str, Tensor], scaling: float) -> None:
    """Writes an adapter into the buffers of vLLM's own LoRA layers. Nothing may be sampled meanwhile.

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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def register() -> None:
    """Entry point of the group `vllm.general_plugins`: vLLM calls it in the front end and in every engine process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, SafetensorsTransferEngine)
    update.install()
    adapter_products.install()
    cpu_build.install()
    if os.environ.get(BIND_VARIABLE) and multiprocessing.parent_process() is not None:
        bind_children()
