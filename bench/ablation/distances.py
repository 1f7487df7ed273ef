"""The distance of an arm's trajectory to the reference's, compared with the distances among the reference's own seeds.

The distance of a curve is the mean over updates of |curve - r|, both smoothed (`drawing.running_mean`), where r is the
mean of the reference's curves of all **other** seeds. So a run of the reference is measured like any other: an arm that
trains as the reference does is as far from it as its seeds are from each other.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from bench.ablation.results import AblationResult, of_arm
from penstock.deploy.report.drawing import running_mean

STANDS_OUT = 1.3
"""A distance stands out from this multiple of the distance between the reference's own seeds."""
Curve = Callable[[AblationResult], np.ndarray]


class Measure(NamedTuple):
    """One column of the table of distances. `digits` are those after the point, of values times `factor`."""

    name: str
    curve: Curve
    factor: float
    digits: int
    unit: str


MEASURES = (
    Measure(
        "clamp_log_ratio_new_old_indicator",
        lambda r: r.curve("clamp_log_ratio_new_old_indicator"),
        100,
        1,
        "points",
    ),
    Measure("kl_new_old", lambda r: r.curve("kl_new_old"), 1e4, 2, "10⁻⁴ nats"),
    Measure("entropy", lambda r: r.curve("entropy"), 1e3, 1, "10⁻³ nats"),
    Measure("reward", lambda r: r.curve("reward"), 100, 1, "points"),
    Measure("current logprobs", lambda r: r.current_logprobs, 1e3, 1, "10⁻³ nats"),
    Measure("policy ratio - 1", lambda r: r.ratio_deviation, 1, 1, "10⁻⁴"),
)


class Distance(NamedTuple):
    """An arm's distances to the reference: of each seed, and the reference's own, largest last."""

    of_seeds: tuple[float, ...]
    of_reference: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.of_seeds)

    @property
    def ratio(self) -> float:
        """The mean over the mean distance between the reference's seeds; nan without a second one, inf if they are
        equal and the arm differs."""
        if not self.of_reference:
            return math.nan
        own = fmean(self.of_reference)
        if own:
            return self.mean / own
        return math.inf if self.mean else 1.0

    @property
    def stands_out(self) -> bool:
        """True if the arm has two seeds or more, every one is farther away than any of the reference's own, and the
        mean is farther by a margin: another run of the reference may exceed a few others by chance."""
        return (
            bool(self.of_reference)
            and len(self.of_seeds) > 1
            and min(self.of_seeds) > max(self.of_reference)
            and self.ratio >= STANDS_OUT
        )


def distance(results: Sequence[AblationResult], arm: str, reference: str, curve: Curve) -> Distance:
    """Returns the distances of an arm that has results; those of the reference itself need two seeds of it.

    Raises:
        ValueError: the arm or the reference has no result.
    """
    references = of_arm(results, reference)
    if not references or not of_arm(results, arm):
        raise ValueError(f"distance of {arm!r} to {reference!r}: expected a result of each")
    return Distance(
        tuple(_distance(result, references, curve) for result in of_arm(results, arm))
        if arm != reference or len(references) > 1
        else (0.0,),
        tuple(sorted(_distance(result, references, curve) for result in references)) if len(references) > 1 else (),
    )


def _distance(result: AblationResult, references: Sequence[AblationResult], curve: Curve) -> float:
    others = [other for other in references if other.cell.seed != result.cell.seed] or list(references)
    own = running_mean(curve(result))
    theirs = np.stack([running_mean(curve(other)) for other in others]).mean(0)
    return float(np.nanmean(np.abs(own - theirs)))
