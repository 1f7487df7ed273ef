"""Catches what a model of vLLM writes into its parameters without their weight loaders.

A reload puts the parameters on the meta device and buffers the calls of their loaders. Some models copy instead, as
gpt-oss does its experts and sinks: on the meta device that does nothing, and the former weights would be kept without a
word.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise


class _Write(NamedTuple):
    """A copy into part of a parameter: the part's size, stride and storage offset."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    values: Tensor


class _Copies(TorchDispatchMode):
    """Buffers copies onto the meta device that no loader makes, and processes each layer once it is complete."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.in_loader = False
        self._owners = {
            tensor.untyped_storage()._cdata: (layer, name)
            for layer in model.modules()
            for name, tensor in layer._parameters.items()
            if tensor is not None and tensor.is_meta
        }
        """Layer and name of each parameter on the meta device, by its storage."""
        self._writes: dict[torch.nn.Module, dict[str, list[_Write]]] = {}
        """Of the layers that are not complete, by parameter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and not self.in_loader and args[0].is_meta:
            owner = self._owners.get(args[0].untyped_storage()._cdata)
            if owner is not None:
                self._buffer(*owner, args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _buffer(self, layer: torch.nn.Module, name: str, part: Tensor, values: Tensor) -> None:
        writes = self._writes.setdefault(layer, {}).setdefault(name, [])
        writes.append(_Write(tuple(part.shape), part.stride(), int(part.storage_offset()), values.expand(part.shape)))
        info: Any = layerwise.get_layerwise_info(layer)
        info.load_numel += part.numel()
        if len(writes) == 1:
            replay = _replay(writes)
            layer._parameters[name].weight_loader = replay  # type: ignore[union-attr]
            info.loaded_weights.append((name, inspect.signature(replay).bind(None)))
        if info.load_numel >= info.load_numel_total:
            layerwise._layerwise_process(layer, info)
            del self._writes[layer]


def _replay(writes: list[_Write]) -> Callable[[Any], None]:
    def write(param: Any) -> None:
        for size, stride, offset, values in writes:
            param.data.as_strided(size, stride, offset).copy_(values)

    return write


@contextmanager
def direct_writes(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, between the start and the end of a reload, copies into parameters of `model` load them."""
    loading: Any = layerwise
    copies, count = _Copies(model), loading.get_numel_loaded

    def counted(*arguments: Any) -> Any:
        copies.in_loader = True
        try:
            return count(*arguments)
        finally:
            copies.in_loader = False

    loading.get_numel_loaded = counted
    try:
        with copies:
            yield
    finally:
        loading.get_numel_loaded = count
