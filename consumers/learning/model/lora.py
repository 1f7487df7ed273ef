"""Low-rank adapters: linear layers with a frozen weight plus a trained product of two small matrices."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.schemas.adapter import find_targets, tensor_name
from penstock.schemas.config import LoraConfig

FACTORS = ("A", "B")


class LoraLinear(nn.Module):
    """y = W x + b + (alpha / rank) B A x, with W [out, in] and b frozen, A [rank, in] and B [out, rank] trained.

    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (arXiv 2106.09685), section 4.1. B begins at zero, so
    that the first policy is the base. A begins uniform within 1 / sqrt(in) (He et al.'s rule with a = sqrt(5), as in
    peft), where the paper draws it from a Gaussian. The scale is multiplied into B, as engines do.
    """

    def __init__(self, base: nn.Linear, lora: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        num_out, num_in = base.weight.shape
        self.weight, self.bias = base.weight, base.bias
        bound = 1 / math.sqrt(num_in)
        first = torch.empty(lora.rank, num_in).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(first.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(num_out, lora.rank, device=base.weight.device))
        self.scaling = lora.scaling
        self.share = 1.0
        """The adapter's share in the result: 0 computes the base."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.share == 0:
            return y
        return y + F.linear(F.linear(x, self.lora_A), self.lora_B * (self.scaling * self.share))


def adapt(module: nn.Module, lora: LoraConfig, seed: int, path: str) -> None:
    """Adds an adapter to the linear layers of a frozen model that `lora` names, in place.

    Equal seeds give equal adapters.

    Raises:
        ConfigError: the model of `path` lacks a target.
    """
    linear = {name: each for name, each in module.named_modules() if type(each) is nn.Linear}
    generator = torch.Generator().manual_seed(seed)
    for name in find_targets(lora, linear, path):
        owner, _, own_name = name.rpartition(".")
        setattr(module.get_submodule(owner), own_name, LoraLinear(linear[name], lora, generator))


def adapter_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the adapters' masters by parameter name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def published_name(parameter: str) -> str:
    """Returns peft's name of an adapter's parameter."""
    owner, _, own_name = parameter.rpartition(".")
    return tensor_name(owner, own_name.removeprefix("lora_"))


@contextmanager
def adapter_share(module: nn.Module, share: float) -> Iterator[None]:
    """Makes the model compute with this share of its adapters for a block: 0 computes the base."""
    layers = [each for each in module.modules() if isinstance(each, LoraLinear)]
    for layer in layers:
        layer.share = share
    try:
        yield
    finally:
        for layer in layers:
            layer.share = 1.0
