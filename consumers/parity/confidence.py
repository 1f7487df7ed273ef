"""The least gap that a sample of rollouts still speaks for: the lower end of a bootstrap interval.

Gaps have heavy tails, and the tokens of a rollout are not independent: they share a context. So rollouts are drawn
again, each with all its tokens (the Poisson bootstrap: a rollout counts as often as a Poisson variable of mean 1 says).
A figure is shown to be beyond a bound if it is in all but `1 - LEVEL` of `NUM_DRAWS` such draws. One rollout alone
shows nothing: more than a third of the draws lack it.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.loss.rows import LOG_RATIO_BOUND
from penstock.consumers.parity.sample import Sample
from penstock.consumers.parity.tolerance import Gap

LEVEL = 0.975
"""One-sided: the lower end of a 95% interval."""
NUM_DRAWS = 2000
MIN_ROLLOUTS = 8
"""Fewer show nothing."""
_TOP = 0.03
"""The share of the tokens, those of the largest gaps, that the draws' p99 is looked for in."""


class Evidence:
    """Differences between recorded and recomputed logprobs, by rollout, of one batch or of several."""

    def __init__(self) -> None:
        self._differences: list[Tensor] = []
        self._rollouts: list[np.ndarray] = []
        self.num_rollouts = 0

    def add(self, sample: Sample, baseline: Tensor) -> None:
        """Adds a sample. baseline: [M] float64, its logprobs as the trainer computes them."""
        numbers: dict[tuple[int, int], int] = {}
        of_row = [numbers.setdefault((row.group, row.sibling), len(numbers)) for row in sample.rows]
        self._differences.append(baseline - sample.engine)
        self._rollouts.append(self.num_rollouts + np.array(of_row)[sample.rows_of])
        self.num_rollouts += sample.num_rollouts

    @property
    def differences(self) -> Tensor:
        """[M] float64, trainer - engine."""
        return torch.cat(self._differences)

    def lower(self) -> Gap | None:
        """Returns the lower ends of the gap's figures; None if there are too few rollouts."""
        if self.num_rollouts < MIN_ROLLOUTS:
            return None
        return lower_end(self.differences.numpy(), np.concatenate(self._rollouts))


def lower_end(differences: np.ndarray, rollouts: np.ndarray) -> Gap:
    """Returns the lower end of every figure of the gap. differences: [M], nats. rollouts: [M] int64, from 0."""
    num_rollouts = int(rollouts.max()) + 1
    draws = np.random.default_rng(0).poisson(1.0, (NUM_DRAWS, num_rollouts)).astype(np.float32)
    sizes = np.abs(differences)
    ratios = np.exp(np.clip(differences, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))

    def drawn(values: np.ndarray) -> np.ndarray:
        return draws @ np.bincount(rollouts, values, num_rollouts)

    num_tokens = np.maximum(drawn(np.ones(len(sizes))), 1.0)
    worst = np.zeros(num_rollouts)
    np.maximum.at(worst, rollouts, sizes)
    order = np.argsort(-worst)
    return Gap(
        num_tokens=len(sizes),
        mean=_low(drawn(sizes) / num_tokens),
        p99=_low(_p99(draws, sizes, rollouts, num_tokens)),
        max=_low(worst[order][np.argmax(draws[:, order] > 0, axis=1)]),
        chi2=_low(drawn(ratios**2) / num_tokens) - 1,
        ess_fraction=float("nan"),
    )


def _low(values: np.ndarray) -> float:
    return float(np.sort(values)[int((1 - LEVEL) * len(values))])


def _p99(draws: np.ndarray, sizes: np.ndarray, rollouts: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Returns the p99 of each draw: the largest size that more than 1% of its tokens reach."""
    top = np.argsort(-sizes)[: max(1000, int(_TOP * len(sizes)))]
    reached = np.cumsum(draws[:, rollouts[top]], axis=1) > 0.01 * num_tokens[:, None]
    return np.where(reached[:, -1], sizes[top][np.argmax(reached, axis=1)], 0.0)
