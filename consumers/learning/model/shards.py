"""A model whose parameters several ranks share: FSDP2, block by block."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from penstock.consumers.learning.model.blocks import blocks
from penstock.consumers.learning.model.expert_ranks import spread_experts
from penstock.consumers.learning.model.loading import body_of, language_of
from penstock.consumers.learning.ranks import Ranks
from penstock.schemas.config import ConfigError


class _BodyAndHead(nn.Module):
    """The root of the shards: embedding, last norm and head are gathered together."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, **arguments: Any) -> Tensor:
        hidden: Tensor = body_of(self.module)(**arguments).last_hidden_state
        return hidden


def shard(
    module: Any, mesh: DeviceMesh, dtype: torch.dtype, kept: Collection[str], field: str, *, by_expert: bool
) -> _BodyAndHead:
    """Shards every block and the rest of the model over the ranks; returns the module that runs the model.

    A block's parameters are gathered in `dtype` while it runs; gradients are added up in float32 over the ranks, not
    averaged: the loss is a sum over all ranks' tokens already.

    kept: names of the parameters that are gathered in their own type; of these, untrained ones are whole on every rank.
    by_expert: experts are not gathered: see `spread_experts`.

    Raises:
        ConfigError: no blocks are found, or a module has kept and other parameters; `field` names the model.
    """
    # A rank whose rows have no images does not run a vision tower, which is gathered with the root.
    found = blocks(language_of(module), field, "trainer.num_processes = 1")
    # Inputs stay as they are, as without shards.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    kept_parameters = [(name, parameter) for name, parameter in module.named_parameters() if name in kept]
    apart = {parameter for _, parameter in kept_parameters if not parameter.requires_grad}
    if by_expert:
        apart |= spread_experts(module, mesh, dtype)
    for owner in _owners(module, [name for name, parameter in kept_parameters if parameter.requires_grad], field):
        fully_shard(owner, mesh=mesh, mp_policy=replace(policy, param_dtype=None), ignored_params=apart)
    for block in found:
        fully_shard(block, mesh=mesh, mp_policy=policy, ignored_params=apart)
    root = _BodyAndHead(module)
    fully_shard(root, mesh=mesh, mp_policy=policy, ignored_params=apart)
    for each in root.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
            each.set_reduce_scatter_unused_params(True)  # experts that got no token of this rank
    return root


def _owners(module: nn.Module, names: Sequence[str], field: str) -> list[nn.Module]:
    """Returns the modules with the parameters of these names, and no others, the innermost first."""
    owners = sorted({name.rpartition(".")[0] for name in names}, key=lambda owner: -owner.count("."))
    for owner in owners:
        trained = [name for name, each in module.get_submodule(owner).named_parameters(owner) if each.requires_grad]
        if other := set(trained) - set(names):
            raise ConfigError(
                f"{field}: {min(other)} is held in another type than others of {owner}, which ranks cannot share; "
                "expected trainer.num_processes = 1"
            )
    return [module.get_submodule(owner) for owner in owners]


@torch.no_grad()
def fill(module: nn.Module, whole: nn.Module | None, ranks: Ranks, device: torch.device) -> None:
    """Gives every rank its shards of the lead's whole model, parameter by parameter, and all of what is not shared."""
    assert ranks.mesh is not None
    source = dict(whole.named_parameters()) if whole is not None else {}
    unshared = dict(whole.named_buffers()) if whole is not None else {}
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            if whole is not None:
                unshared[name] = source[name].data
            continue
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        full = source[name].to(device, parameter.dtype) if whole is not None else empty
        parameter.to_local().copy_(distribute_tensor(full, ranks.mesh, [Shard(0)], src_data_rank=0).to_local())
    for name, tensor in ranks.gather(unshared)[0].items():
        owner, _, own_name = name.rpartition(".")
        holder = module.get_submodule(owner)
        if own_name in holder._parameters:
            holder.get_parameter(own_name).data = tensor.to(device)
        else:
            holder._buffers[own_name] = tensor.to(device)


@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], ranks: Ranks) -> dict[str, Tensor]:
    """Gathers the tensors on the lead's CPU, whole and in their `dtypes`; returns nothing on other ranks."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        own: Any = tensor.detach().to(dtypes[name])
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
