"""Gaps between engine and trainer, the largest that counts as parity, and the yardstick that it is measured by.

Needs neither torch nor a model.
"""

import math
from typing import Literal, NamedTuple

import msgspec


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """|engine - trainer| over some tokens, in nats; NaN over none."""

    num_tokens: int
    mean: float
    p99: float
    max: float
    chi2: float
    ess_fraction: float


class Excess(NamedTuple):
    """A figure of a gap that is beyond its bound."""

    figure: Literal["mean", "p99", "max", "chi2"]
    value: float
    bound: float

    def __str__(self) -> str:
        return f"{self.figure} {self.value:.1e}, {self.bound:.1e} is allowed"


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """The largest gap that counts as parity."""

    mean: float
    p99: float
    max: float | None
    chi2: float | None = None

    def allows(self, gap: Gap) -> bool:
        """Returns whether `gap` counts as parity; False over no tokens."""
        return gap.num_tokens > 0 and self.excess(gap) is None

    def excess(self, gap: Gap) -> Excess | None:
        """Returns the first figure of `gap` beyond its bound; NaN is beyond every bound."""
        bounds: tuple[tuple[Literal["mean", "p99", "max", "chi2"], float | None], ...] = (
            ("mean", self.mean),
            ("p99", self.p99),
            ("max", self.max),
            ("chi2", self.chi2),
        )
        for figure, bound in bounds:
            if bound is not None and not getattr(gap, figure) <= bound:
                return Excess(figure, getattr(gap, figure), bound)
        return None


TOLERANCES = {
    "float32": Tolerance(mean=1e-5, p99=5e-5, max=1e-4),
    "bfloat16": Tolerance(mean=5e-2, p99=0.2, max=None, chi2=5e-3),
    "float16": Tolerance(mean=6e-3, p99=2.5e-2, max=None, chi2=2e-3),
}
"""By `model.dtype`, the least tolerances, those of a small model. In 16 bits they find large faults only: body noise
hides small ones, which float32 shows."""
YARDSTICKS = {"float32": 8.0, "bfloat16": 2.0, "float16": 2.0}
"""By `model.dtype`, how many times the model's own yardstick the mean gap may be. An engine has other kernels for every
layer, the computations behind the yardstick for attention only: in float32 a sound engine is at 2 to 4 times it. In
bfloat16 rounding between layers outweighs the kernels, and a sound engine is at once."""
_TAIL = {"p99": 10.0, "max": 100.0, "chi2": 10.0}
"""Of the tolerance's mean (of its square for chi2). Of their own mean sound engines were seen at 3 to 10, 4 to 20 and 8
times it; the largest of many tokens is larger than that of a few."""
_SAME_MODEL = 10.0
"""The packed pass is wrong if it differs from transformers by more than this many times the yardstick or its floor."""


class Yardstick(msgspec.Struct, frozen=True, kw_only=True):
    """How much exact computations of one model in its dtype differ: mean |difference| of their logprobs, in nats.

    transformers: its own eager and sdpa attention, row by row; NaN if the model has one of them only.
    packed: the trainer's packed pass against either, the larger.
    num_tokens: over how many tokens.
    """

    transformers: float
    packed: float
    num_tokens: int

    @property
    def mean(self) -> float:
        return max(self.packed, self.transformers)  # packed where the other is NaN

    def packed_excess(self, dtype: str) -> Excess | None:
        """Returns by what the packed pass is no exact computation of the model, None if it is one."""
        bound = _SAME_MODEL * max(TOLERANCES[dtype].mean, self.transformers)
        return None if self.packed <= bound else Excess("mean", self.packed, bound)

    def tolerance(self, dtype: str) -> Tolerance:
        """Returns the tolerance for engines of this model."""
        floor = TOLERANCES[dtype]
        mean = YARDSTICKS[dtype] * (self.mean if self.packed_excess(dtype) is None else self.transformers)
        if math.isnan(mean):
            return floor
        return Tolerance(
            mean=max(floor.mean, mean),
            p99=max(floor.p99, _TAIL["p99"] * mean),
            max=None if floor.max is None else max(floor.max, _TAIL["max"] * mean),
            chi2=None if floor.chi2 is None else max(floor.chi2, _TAIL["chi2"] * mean**2),
        )


def tolerance_of(yardstick: Yardstick | None, dtype: str) -> Tolerance:
    """Returns the tolerance of a run: the least one until its yardstick is known."""
    return TOLERANCES[dtype] if yardstick is None else yardstick.tolerance(dtype)
