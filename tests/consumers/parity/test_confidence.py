"""How often the gate refuses a sound engine, and a wrong one, over models, dtypes and lengths of answers: computed."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from penstock.consumers.parity.confidence import lower_end
from penstock.consumers.parity.gate import MAX_BATCHES
from penstock.consumers.parity.tolerance import Tolerance, Yardstick
from penstock.consumers.parity.verdict import gap_of

GROUPS, SIBLINGS = 8, 8
"""Of a batch."""


@dataclass(frozen=True)
class SoundEngine:
    """A model as measured: its yardstick, and the gap of a sound engine, in nats.

    The sizes of the gaps are log-normal, sigma 1.3: the p99 is 9 times the mean and the largest of 1,000 is 25 times
    it, a heavier tail than any measured one. A third of their variance is common to a rollout's tokens.
    """

    name: str
    dtype: str
    yardstick: float
    gap: float

    @property
    def tolerance(self) -> Tolerance:
        measured = Yardstick(transformers=self.yardstick, packed=self.yardstick, num_tokens=500)
        return measured.tolerance(self.dtype)

    def batch(self, random: np.random.Generator, num_tokens: int, times: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """Returns [M] differences and the rollout of each, for answers of a mean length."""
        rollouts = np.repeat(np.arange(GROUPS * SIBLINGS), random.geometric(1 / num_tokens, GROUPS * SIBLINGS))
        sigma = 1.3
        common = random.normal(0, sigma * 3**-0.5, GROUPS * SIBLINGS)[rollouts]
        sizes = np.exp(common + random.normal(0, sigma * (2 / 3) ** 0.5, len(rollouts)) - sigma**2 / 2)
        return times * self.gap * sizes * random.choice([-1, 1], len(rollouts)), rollouts


MODELS = [
    SoundEngine("0.3M", "float32", 1e-7, 3e-7),
    SoundEngine("0.3M", "bfloat16", 6e-3, 8e-3),
    SoundEngine("10M", "float32", 1e-6, 3e-6),
    SoundEngine("10M", "bfloat16", 1.5e-2, 1.5e-2),
    SoundEngine("135M", "float32", 3e-6, 1.1e-5),
    SoundEngine("135M", "bfloat16", 3e-2, 3e-2),
]
LENGTHS = (2, 8, 32, 125, 500)


def refused_after(model: SoundEngine, random: np.random.Generator, num_tokens: int, times: float = 1.0) -> int | None:
    """Returns after how many batches the gate refuses; None if it lets the run go on."""
    differences, rollouts = np.empty(0), np.empty(0, dtype=np.int64)
    for batch in range(1, MAX_BATCHES + 1):
        drawn, of = model.batch(random, num_tokens, times)
        differences, rollouts = np.append(differences, drawn), np.append(rollouts, of + 64 * batch)
        _, numbers = np.unique(rollouts, return_inverse=True)
        gap = gap_of(torch.zeros(len(differences)), torch.from_numpy(differences))
        if model.tolerance.allows(gap):
            return None
        if model.tolerance.excess(lower_end(differences, numbers)) is not None:
            return batch
    return None


def grid():
    """A few cells, and all of them where everything is tested."""
    for model in MODELS:
        for num_tokens in LENGTHS:
            is_corner = num_tokens == 2 and model.name != "10M"
            yield pytest.param(
                model,
                num_tokens,
                marks=() if is_corner else pytest.mark.exhaustive,
                id=f"{model.name}-{model.dtype}-{num_tokens}",
            )


@pytest.mark.parametrize(("model", "num_tokens"), list(grid()))
def test_a_sound_engine_is_not_refused_and_a_wrong_one_is(model, num_tokens):
    random = np.random.default_rng(0)
    sound = [refused_after(model, random, num_tokens) for _ in range(400)]
    assert sum(batches is not None for batches in sound) <= 2, "0.5% of the runs at most"
    wrong = 3 * model.tolerance.mean / model.gap
    found = [refused_after(model, random, num_tokens, wrong) for _ in range(40)]
    assert None not in found and np.mean(found) < 1.5


@pytest.mark.exhaustive
def test_the_lower_end_covers_what_it_claims():
    """Over batches of heavy-tailed gaps, the true mean and p99 are below the lower ends in 2.5% of the draws or so."""
    model, random = MODELS[4], np.random.default_rng(1)
    differences = np.abs(np.concatenate([model.batch(random, 32)[0] for _ in range(200)]))
    truth = differences.mean(), np.quantile(differences, 0.99)
    ends = [lower_end(*model.batch(random, 32)) for _ in range(100)]
    missed = [sum(getattr(end, name) > true for end in ends) for name, true in zip(("mean", "p99"), truth, strict=True)]
    assert all(count <= 0.07 * 100 for count in missed), missed


def test_one_rollout_shows_nothing():
    rollouts = np.repeat(np.arange(64), 10)
    differences = np.full(640, 1e-7)
    differences[:10] = 5.0
    end = lower_end(differences, rollouts)
    assert end.mean == end.p99 == end.max == pytest.approx(1e-7)
    differences[:60] = 5.0
    end = lower_end(differences, rollouts)
    assert end.mean > 0.05 and end.p99 == end.max == 5.0
