"""The optimizer, AdamW or one by its import path, and the learning rate of each step: warm-up, plateau, decay.

Formula, of step n = 0, 1, .. of N planned ones, with W of warm-up, D of decay and the configured rate, the peak::

    n < W            peak * (n + 1) / W            the last warm-up step has the peak
    otherwise        peak * f(x),  x = min(1, (N - n) / D) and 0 from n = N on
                     constant f = 1;  linear f = x;  cosine f = (1 - cos(pi * x)) / 2

D = N - W unless `trainer.decay_steps` says otherwise; a smaller D leaves a plateau at the peak: warmup-stable-decay.

Source: cosine SGDR (arXiv 1608.03983, eq. 5, one cycle); warmup-stable-decay MiniCPM (arXiv 2404.06395, section 4). The
values are those of transformers' schedules of these names, whose warm-up begins at n / W, with a step at rate 0.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.schemas.config import ConfigError, Plug, RunConfig, TrainerConfig
from penstock.schemas.process.plugins import resolve

_FIELD = "trainer.optimizer"


def learning_rate(config: RunConfig, step: int) -> float:
    """Returns the rate of optimizer step `step`, counted from 0 over the steps taken."""
    trainer = config.trainer
    if step < trainer.warmup_steps:
        return trainer.learning_rate * (step + 1) / trainer.warmup_steps
    if trainer.decay == "constant":
        return trainer.learning_rate
    num_decay = trainer.decay_steps or max(1, config.num_steps_planned - trainer.warmup_steps)
    left = min(1.0, max(0.0, (config.num_steps_planned - step) / num_decay))
    return trainer.learning_rate * (left if trainer.decay == "linear" else (1 - math.cos(math.pi * left)) / 2)


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
