"""The rounding of float32 masters to the published policy: how fast the policy follows them."""

import hashlib
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from penstock.consumers.learning.model.shards import held
from penstock.consumers.learning.ranks import Ranks

NUM_STEPS = 50
"""Optimizer steps within which a weight should reach the published policy."""
_SAMPLE_SIZE = 1 << 16


@torch.no_grad()
def dither(module: nn.Module, dtype: torch.dtype, seed: int, kept: Collection[str] = ()) -> None:
    """Moves every trainable float32 parameter that `dtype` holds exactly to a place of its own, uniform over the values
    that round to it.

    A checkpoint in `dtype` has each weight in the middle of its rounding interval, so that none reaches the published
    policy before it has moved by half a unit in the last place. With a place of its own a weight crosses into the next
    interval with probability |movement| / unit: over the weights the published movement is the true one from the first
    step. Rounding to nearest from such a place equals a fixed threshold u(i) per weight in place of one half
    (non-subtractive dither: Roberts, 1962; Lipshitz, Wannamaker and Vanderkooy, 1992), as long as the unit stays.

    The published weights are those of the undithered model, bit for bit. Each place is determined by `seed`, the
    parameter's name and the element's number. Zeros stay where they are: around them the unit is far below any step.

    kept: names of the parameters that are published in float32, which stay as they are.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float32 and name not in kept:
            generator = torch.Generator().manual_seed(_seed(seed, name))
            place = torch.rand(parameter.shape, generator=generator).to(parameter.device)
            parameter.copy_(_placed(parameter, place, dtype))


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()) >> 1


def _placed(values: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns each value, if `dtype` holds it, at `place` (in [0, 1)) between the values halfway to its neighbours."""
    size = values.abs()
    rounded = size.to(dtype)
    bits = rounded.view(torch.int16)  # neighbours of a positive float are those of its bits
    inner, outer = ((bits + step).view(dtype).float() for step in (-1, 1))
    low, high = (size + inner) / 2, (size + outer) / 2
    moved = low + place * (high - low)
    # The float32 sum may reach an end of the interval, which rounds to even.
    is_free = (rounded.float() == size) & (size > 0) & outer.isfinite() & (moved.to(dtype) == rounded)
    return torch.where(is_free, torch.copysign(moved, values), values)


class Movement:
    """A sample of the masters, of this rank of `ranks`, and where they stood when the run began.

    parameters: as they begin; with a resumed run before its checkpoint is loaded. dtype: of the published policy.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, ranks: Ranks) -> None:
        self._parameters, self._ranks = parameters, ranks
        self._dtype = dtype
        self._stride = max(1, sum(len(elements) for elements in self._held()) // _SAMPLE_SIZE)
        self._start = self._sample()

    def _sample(self) -> Tensor:
        return torch.cat([elements[:: self._stride] for elements in self._held()])

    def _held(self) -> list[Tensor]:
        return [held(parameter.detach(), self._ranks)[1] for parameter in self._parameters]

    def published_share(self) -> float:
        """Returns the share of the masters' movement since the start that the published policy has made: the slope of
        the published weights' movement on that of the masters. 1 without movement."""
        now, start = self._sample(), self._start
        moved = (now - start).double()
        made = (now.to(self._dtype).double()) - start.to(self._dtype).double()
        square = (moved * moved).sum()
        return (made * moved).sum().div(square).item() if square > 0 else 1.0

    def slowest_rate(self) -> float:
        """Returns the learning rate at which half of the weights that start in the middle of their rounding interval
        leave it within `NUM_STEPS` optimizer steps in one direction, each as long as the rate (as Adam's first)."""
        size = self._start.abs().to(self._dtype)
        outer = (size.view(torch.int16) + 1).view(self._dtype)
        return ((outer.float() - size.float()) / 2).median().item() / NUM_STEPS
