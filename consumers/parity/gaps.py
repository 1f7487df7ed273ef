"""How far recorded logprobs are from recomputed ones."""

import math

import torch
from penstock.consumers.learning.rows import LOG_RATIO_BOUND
from penstock.consumers.parity.report import Gap, Tolerance
from torch import Tensor

NOTHING = Gap(num_tokens=0, mean=math.nan, p99=math.nan, max=math.nan, chi2=math.nan, ess_fraction=math.nan)


def gap_of(engine: Tensor, trainer: Tensor) -> Gap:
    """The gap between [M] recorded and [M] recomputed logprobs, over the tokens that both have: NaN is not there.

    chi2 = <e^2c> - 1 and ess_fraction = (sum e^c)^2 / (M sum e^2c), with c = trainer - engine clamped to +-20.
    """
    difference = (trainer.double() - engine.double())[~(engine.isnan() | trainer.isnan())]
    if not len(difference):
        return NOTHING
    ratios = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    size, squares = difference.abs(), ratios.square()
    return Gap(
        num_tokens=len(size),
        mean=float(size.mean()),
        p99=quantile(size, 0.99),
        max=float(size.max()),
        chi2=float(squares.mean()) - 1,
        ess_fraction=float(ratios.sum() ** 2 / (len(ratios) * squares.sum())),
    )


def quantile(values: Tensor, share: float) -> float:
    """The smallest value that `share` of [M] values do not exceed."""
    return float(values.kthvalue(max(1, math.ceil(share * len(values)))).values)


def without_worst(engine: Tensor, trainer: Tensor, share: float) -> Gap:
    """`gap_of` after at most `share` of the tokens, those of the largest gap, are left out: a choice at a boundary may
    fall either way."""
    size = (trainer.double() - engine.double()).abs()
    known = size[~size.isnan()]
    num_left_out = int(share * len(known))
    if not num_left_out:
        return gap_of(engine, trainer)
    limit = known.kthvalue(len(known) - num_left_out).values
    return gap_of(torch.where(size <= limit, engine, torch.nan), trainer)


def passes(gap: Gap, tolerance: Tolerance) -> bool:
    """Whether `gap` counts as parity; False over no tokens."""
    return (
        gap.num_tokens > 0
        and gap.mean <= tolerance.mean
        and gap.p99 <= tolerance.p99
        and (tolerance.max is None or gap.max <= tolerance.max)
        and (tolerance.chi2 is None or gap.chi2 <= tolerance.chi2)
        and (tolerance.ess_fraction is None or gap.ess_fraction >= tolerance.ess_fraction)
    )
