"""The warm start of a model: supervised steps on lessons until it is as good as its recipe says."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from penstock.deploy.demo.model_recipe import ModelRecipe, WarmStartError
from torch.nn import functional as F
from transformers import Qwen3ForCausalLM

_WARM_UP_STEPS = 20
_LAST_LEARNING_RATE = 0.05
"""Share of the learning rate that the schedule ends at."""


class Lessons(Protocol):
    """The lessons of one task."""

    skill: str
    """Name of the second share that `held_out` measures, as it follows "held-out accuracy 0.4,"."""
    enough: float
    """The least skill that RL can start from."""
    advice: str
    """The fields of the recipe that change the two shares."""

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next examples, `[batch, length]`, and the targets of their last positions, `[batch, at most length - 1]`;
        -100 for none."""
        ...

    def held_out(self, model: Qwen3ForCausalLM) -> tuple[float, float]:
        """Shares of the held-out problems: right answers, and the skill."""
        ...


def warm_start(
    model: Qwen3ForCausalLM, lessons: Lessons, recipe: ModelRecipe, progress: Callable[[str], None]
) -> float:
    """Trains until the skill is there; returns the held-out accuracy.

    Raises:
        WarmStartError: the accuracy is outside the band, or the skill is missing after twice `num_steps`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(1, 2 * recipe.num_steps + 1):
        token_ids, targets = lessons.batch()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.num_steps)
        loss = _step(model, optimizer, token_ids, targets)
        if step % 100 == 0:
            progress(f"warm start: step {step} of {recipe.num_steps}, loss {loss:.3f}")
        if step >= recipe.num_steps and (step - recipe.num_steps) % 20 == 0:
            accuracy, known = lessons.held_out(model)
            progress(f"warm start: held-out accuracy {accuracy:.3f}, {lessons.skill} {known:.3f}")
            if known >= lessons.enough and recipe.lowest_accuracy <= accuracy <= recipe.highest_accuracy:
                return accuracy
    raise WarmStartError(
        f"after {step} steps the held-out accuracy is {accuracy:.3f}, expected {recipe.lowest_accuracy} to "
        f"{recipe.highest_accuracy}, and {known:.3f} of the answers are {lessons.skill}, expected {lessons.enough}: "
        f"{lessons.advice}"
    )


def _step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, token_ids: torch.Tensor, targets: torch.Tensor
) -> float:
    logits = model(input_ids=token_ids[:, :-1], logits_to_keep=targets.shape[1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _schedule(step: int, num_steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))
    return min(1.0, step / _WARM_UP_STEPS) * max(_LAST_LEARNING_RATE, cosine)
