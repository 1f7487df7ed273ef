"""A model whose parameters several ranks share: FSDP2, block by block."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.consumers.learning.model.attention import IMPLEMENTATION
from penstock.consumers.learning.model.blocks import blocks
from penstock.consumers.learning.ranks import Ranks


class _BodyAndHead(nn.Module):
    """The root of the shards: embedding, last norm and head are gathered together."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, **arguments: Any) -> Tensor:
        hidden: Tensor = self.module.get_decoder()(**arguments).last_hidden_state
        return hidden


def empty_model(path: str, dtype: torch.dtype) -> Any:
    """Returns the model of a transformers folder with uninitialized parameters, which take no memory yet; buffers are
    empty."""
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), attn_implementation=IMPLEMENTATION, dtype=dtype
        )
    module.tie_weights()
    filled: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, dtype=dtype, device="cpu")
                each._parameters[name] = filled.setdefault(id(parameter), nn.Parameter(empty))
    return module


def shard(module: Any, mesh: DeviceMesh, dtype: torch.dtype, field: str) -> _BodyAndHead:
    """Shards every block and the rest of the model over the ranks; returns the module that runs the model.

    A block's parameters are gathered in `dtype` while it runs; gradients are added up in float32 over the ranks, not
    averaged: the loss is a sum over all ranks' tokens already.

    Raises:
        ConfigError: no blocks are found; `field` names the model.
    """
    found = blocks(module, field, "trainer.num_processes = 1")
    # Inputs stay as they are, as without shards.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in found:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    root = _BodyAndHead(module)
    fully_shard(root, mesh=mesh, mp_policy=policy)
    for each in root.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
            each.set_reduce_scatter_unused_params(True)  # experts that got no token of this rank
    return root


@torch.no_grad()
def fill(module: nn.Module, whole: nn.Module | None, ranks: Ranks, device: torch.device) -> None:
    """Gives every rank its shards of the lead's whole model, parameter by parameter, and all of its buffers."""
    assert ranks.mesh is not None
    source = dict(whole.named_parameters()) if whole is not None else {}
    for name, parameter in module.named_parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        full = source[name].to(device, parameter.dtype) if whole is not None else empty
        _local(parameter).copy_(distribute_tensor(full, ranks.mesh, [Shard(0)], src_data_rank=0).to_local())
    buffers = ranks.gather(dict(whole.named_buffers()) if whole is not None else {})[0]
    for name, buffer in buffers.items():
        owner, _, own_name = name.rpartition(".")
        module.get_submodule(owner)._buffers[own_name] = buffer.to(device)


@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor], dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """Gathers the tensors on the lead's CPU, shared ones whole and in `dtype`; returns nothing on other ranks."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own: Any = tensor.detach().to(dtype) if isinstance(tensor, DTensor) else tensor.detach()
        full: Tensor = own.full_tensor() if isinstance(own, DTensor) else own
        if ranks.is_lead:
            state[name] = full.cpu()
    return state


def held(tensor: Tensor, ranks: Ranks) -> tuple[int, Tensor]:
    """Returns this rank's part of a tensor: the number of elements before it in row-major order, and the elements,
    [count]. A tensor that is not shared belongs to the lead."""
    if isinstance(tensor, DTensor):
        num_rows = -(-tensor.shape[0] // ranks.size)  # as FSDP2 shards: the last ranks have fewer
        first = min(ranks.rank * num_rows, tensor.shape[0])
        return first * math.prod(tensor.shape[1:]), tensor.to_local().reshape(-1)
    elements = tensor.reshape(-1)
    return 0, elements if ranks.is_lead else elements[:0]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
