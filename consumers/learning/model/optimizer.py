"""The optimizer: AdamW, or one by its import path."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.schemas.config import ConfigError, Plug, TrainerConfig
from penstock.schemas.process.plugins import resolve

_FIELD = "trainer.optimizer"


def make_optimizer(config: TrainerConfig, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Makes the optimizer of these parameters; one named by its path is first tried on a probe.

    AdamW decays the weights of parameters with two or more dimensions, as nanoGPT's `configure_optimizers` does: not
    norms and biases, but embeddings.

    Raises:
        ConfigError: it cannot be made or take a step, leaves parameters out, or has a state that a checkpoint cannot
            hold for any number of ranks.
    """
    plug = config.optimizer
    if plug is None:
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
    factory = resolve(plug, _FIELD)
    probe = nn.Parameter(torch.zeros(4, 6))
    probe.grad = torch.ones_like(probe)
    tried = _construct(factory, plug, [probe], config.learning_rate)
    try:
        tried.step()
    except Exception as error:
        raise ConfigError(f"{_FIELD}.path = {plug.path!r}: cannot take a step: {error}") from error
    for name, value in tried.state[probe].items():
        if not (isinstance(value, torch.Tensor) and (value.shape == probe.shape or value.numel() == 1)):
            shown = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ConfigError(
                f"{_FIELD}.path = {plug.path!r}: its state {name!r} of a parameter of {list(probe.shape)} is {shown}; "
                "expected tensors of the parameter's shape or of one element"
            )
    return _construct(factory, plug, parameters, config.learning_rate)


def _construct(factory: Any, plug: Plug, parameters: Sequence[nn.Parameter], learning_rate: float) -> Optimizer:
    try:
        built = factory(parameters, lr=learning_rate, **plug.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_FIELD}: {plug.path} with lr and kwargs = {plug.kwargs!r}: {error}") from error
    if not isinstance(built, Optimizer):
        found = type(built).__name__
        raise ConfigError(f"{_FIELD}.path = {plug.path!r}: makes a {found}, expected a torch.optim.Optimizer")
    held = {id(parameter) for group in built.param_groups for parameter in group["params"]}
    if held != {id(parameter) for parameter in parameters}:
        raise ConfigError(f"{_FIELD}.path = {plug.path!r}: holds {len(held)} of the {len(parameters)} parameters")
    return built
