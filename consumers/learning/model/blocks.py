"""The blocks of a transformers model, and torch.compile of each."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.schemas.config import ConfigError

COMPILED = "trainer.compile = true"


def blocks(module: nn.Module, field: str, expected: str) -> list[nn.Module]:
    """Finds the outermost modules that transformers checkpoints as one or does not split over devices.

    Raises:
        ConfigError: there are none; names `field`, the setting that needs them, and `expected`, its alternative.
    """
    names = set(getattr(module, "_no_split_modules", None) or ())
    found: list[nn.Module] = []

    def search(parent: nn.Module) -> None:
        for child in parent.children():
            if isinstance(child, GradientCheckpointingLayer) or type(child).__name__ in names:
                found.append(child)
            else:
                search(child)

    search(module)
    if not found:
        raise ConfigError(
            f"{field}: the blocks of {type(module).__name__} cannot be found (no GradientCheckpointingLayer, and "
            f"nothing of _no_split_modules in it); expected {expected}"
        )
    return found


def compile_blocks(module: nn.Module, device: torch.device) -> None:
    """Compiles the blocks' forward passes in place, for any number of tokens; parameter names stay.

    Checkpointing of activations and gathering of shards happen outside. Blocks of one kind share their programs, which
    are compiled in the first passes with and without gradient.

    Raises:
        ConfigError: there are no blocks, or nothing can be compiled for `device` here.
    """
    found = blocks(module, COMPILED, "false")
    try:
        torch.compile(lambda tensor: tensor + 1)(torch.zeros(2, device=device))
    except Exception as error:  # a missing or broken compiler may raise anything
        why = " ".join(str(error).partition("\n\n")[0].split())
        raise ConfigError(
            f"{COMPILED}: torch.compile does not work here: {why}; expected a C++ compiler (g++, or CXX), and on "
            "CUDA Triton, or false"
        ) from error
    for block in found:
        block.forward = torch.compile(block.forward, dynamic=True)
