"""Layers of experts over several ranks: each rank holds and computes whole experts, and tokens travel to theirs.

GShard's (arXiv 2006.16668), without its capacity: no token is dropped.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, grouped_mm_experts_forward
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from penstock.consumers.learning.model.exchange import exchanged
from penstock.schemas.config import ConfigError

_NAME = "penstock_expert_ranks"


def check_experts(module: nn.Module, num_ranks: int, named: str) -> None:
    """Raises ConfigError if the model has no layers of experts that transformers runs through its `ExpertsInterface`,
    or a number of experts that the ranks do not divide. `named` is the model's field and value."""
    setting = f"trainer.expert_parallel = true with {named}"
    layers = _layers(module)
    if not layers:
        raise ConfigError(
            f"{setting}: {type(module).__name__} has no layers of experts that transformers computes by grouped "
            "products; expected false"
        )
    for name, experts in layers.items():
        if experts.num_experts % num_ranks:
            raise ConfigError(
                f"{setting}: {name} has {experts.num_experts} experts, which {num_ranks} ranks do not divide; expected "
                "false, or a number of ranks that does"
            )


def _layers(module: nn.Module) -> dict[str, Any]:
    """Returns the layers of experts that transformers' decorator `use_experts_implementation` marks, and Llama 4's, by
    name."""
    marks = {"num_experts", "has_gate", "is_transposed"}
    found = module.named_modules()
    return {name: each for name, each in found if isinstance(each, Llama4TextExperts) or marks <= vars(each).keys()}


def spread_experts(module: Any, mesh: DeviceMesh, dtype: torch.dtype) -> set[nn.Parameter]:
    """Leaves each rank `num_experts / ranks` experts of every layer, uninitialized; returns their parameters, DTensors
    split by experts. Their gradients are sums over all ranks' tokens. What `check_experts` refuses stays as it is.

    dtype: in which they compute.
    """
    layers = list(_layers(module).values())
    if not layers or any(experts.num_experts % mesh.size() for experts in layers):
        return set()
    spread: set[nn.Parameter] = set()
    for experts in layers:
        for own_name, whole in list(experts._parameters.items()):
            part = torch.empty_like(whole[: experts.num_experts // mesh.size()])
            own = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]), whole.requires_grad)
            experts._parameters[own_name] = own
            spread.add(own)
        experts.ranks, experts.dtype = mesh.get_group(), dtype
    for each in module.modules():
        if isinstance(each, Llama4TextMoe):
            vars(each)["forward"] = partial(_llama4, each)
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _forward)
    module.set_experts_implementation(_NAME)
    return spread


@torch.compiler.disable
def _forward(experts: Any, hidden: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
    """Returns the experts' outputs, summed by weight, [N, H]. hidden: [N, H]. choices, weights: [N, k]."""
    group, num_experts = experts.ranks, experts.num_experts
    by_token = choices.reshape(-1)
    order = by_token.argsort(stable=True)
    counts = torch.bincount(by_token, minlength=num_experts)
    met = torch.empty_like(counts)
    dist.all_to_all_single(met, counts, group=group)
    own = num_experts // group.size()
    sent, received = (each.view(-1, own).sum(1).tolist() for each in (counts, met))
    rows = exchanged(hidden[order // choices.shape[1]], sent, received, group)
    ids = torch.arange(own, device=hidden.device).repeat(group.size()).repeat_interleave(met)
    ones = torch.ones_like(rows[:, :1])
    layer: Any = (_OwnLlama4 if isinstance(experts, Llama4TextExperts) else _Own)(experts, own)
    found = grouped_mm_experts_forward(layer, rows, ids[:, None], ones)
    back = exchanged(found, received, sent, group)
    weighted = back[order.argsort()] * weights.reshape(-1, 1)
    return weighted.view(*choices.shape, -1).sum(1).to(hidden.dtype)


def _llama4(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `Llama4TextMoe.forward`, in which every expert computes every token, with the chosen experts alone."""
    hidden = hidden.flatten(0, -2)
    scores, logits = layer.router(hidden)
    weights, choices = scores.topk(layer.top_k)
    rows = (hidden[:, None] * weights[..., None]).flatten(0, 1)
    found = _forward(layer.experts, rows, choices.reshape(-1, 1), torch.ones_like(rows[:, :1]))
    return layer.shared_expert(hidden) + found.view(*choices.shape, -1).sum(1), logits


class _Own:
    """A layer of experts as one with this rank's alone."""

    def __init__(self, experts: Any, num_experts: int) -> None:
        self._experts = experts
        self.num_experts = num_experts
        for name, parameter in experts._parameters.items():
            setattr(self, name, parameter.to_local().to(experts.dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class _OwnLlama4(_Own):
    has_gate = is_transposed = True
    has_bias = _is_expert_parallel = False
    _apply_gate = _default_apply_gate
