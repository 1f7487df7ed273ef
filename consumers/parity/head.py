"""The head on either side: the trainer's against a plain one, and what betrays a bfloat16 head in the engine.

Under body noise of 1e-2 a gap tells nothing of the head. But a bfloat16 head leaves bfloat16 logits: numbers on a grid.
For two different tokens after one context the log-normalizer cancels, so (b_i - b_j) T is a difference of two such
numbers: a multiple of 2^-10 for all but the smallest logits, which a float32 head hits about once in a hundred times.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from penstock.consumers.learning.head import GREEDY_TEMPERATURE
from penstock.consumers.parity.gaps import NOTHING, gap_of
from penstock.consumers.parity.report import Gap
from penstock.consumers.parity.sample import Sample, SampleRow
from torch import Tensor

_GRID = 2.0**-10
_ROUNDING = 2.0**-22
"""Error of a difference of recorded logprobs, relative to their sizes and those of the logits behind them."""
_TYPICAL_LOGIT = 8.0
_MIN_HITS = 5
_MIN_SHARE = 0.5
"""Of the differences that must lie on the grid."""
_MAX_CHANCE = 1e-6
"""Of so many hits under a float32 head."""
_MIN_BETA, _MIN_BETA_Z = 0.25, 6.0


@dataclass(frozen=True)
class Contexts:
    """What sampled tokens after equal contexts say.

    spread: the engine against itself, where two siblings sampled the same token after the same context.
    num_pairs: differences of two different tokens after one context. num_on_grid: those that bfloat16 logits could
    have. expected: how many of them by chance.
    """

    spread: Gap = NOTHING
    num_pairs: int = 0
    num_on_grid: int = 0
    expected: float = 0.0

    @property
    def is_grid(self) -> bool:
        if self.num_on_grid < max(_MIN_HITS, _MIN_SHARE * self.num_pairs):
            return False
        # Markov's bound on exp(n) of independent hits (Chernoff): P(X >= k) <= exp(k - m - k ln(k / m)).
        k, m = self.num_on_grid, max(self.expected, 1e-9)
        return k - m - k * math.log(k / m) <= math.log(_MAX_CHANCE)

    def __str__(self) -> str:
        return (
            f"{self.num_on_grid} of {self.num_pairs} differences of first logprobs after one context are those of "
            f"bfloat16 logits, {self.expected:.1f} would be by chance"
        )


def equal_contexts(sample: Sample) -> Contexts:
    """What the record alone says of the engine's head and its batches, by rows of one policy without penalties."""
    first, second, pairs, hits, expected = [], [], 0, 0, 0.0
    for entries in _by_context(sample.rows):
        by_target: dict[int, list[float]] = defaultdict(list)
        for row, offset, target in entries:
            by_target[target].append(float(sample.engine[row.first + offset]))
        for values in by_target.values():
            first += values[1:]
            second += values[:1] * (len(values) - 1)
        temperature = entries[0][0].sampling.temperature
        temperature = 1.0 if temperature < GREEDY_TEMPERATURE else temperature
        one, *others = (values[0] for values in by_target.values())
        for other in others:
            allowed = _ROUNDING * (_TYPICAL_LOGIT + (abs(one) + abs(other)) * temperature)
            difference = (one - other) * temperature
            pairs += 1
            hits += abs(difference - _GRID * round(difference / _GRID)) <= allowed
            expected += min(1.0, 2 * allowed / _GRID)
    return Contexts(gap_of(torch.tensor(first), torch.tensor(second)), pairs, hits, expected)


def _by_context(rows: Sequence[SampleRow]) -> list[list[tuple[SampleRow, int, int]]]:
    """(row, offset, token id) of tokens with equal contexts in one group, where there are two or more."""
    found: dict[tuple[int, int, bytes], list[tuple[SampleRow, int, int]]] = defaultdict(list)
    by_group: dict[tuple[int, int], list[SampleRow]] = defaultdict(list)
    for row in rows:
        if not row.is_mixed and not row.sampling.has_penalties:
            by_group[row.group, int(row.versions[0])].append(row)
    for (group, version), members in by_group.items():
        ids = {row.first: row.token_ids for row in members}
        # Siblings part for good at their first difference, so only contexts met before are followed.
        alive = [(row, 0) for row in members]
        while len(alive) > 1:
            same: dict[bytes, list[tuple[SampleRow, int]]] = defaultdict(list)
            for row, offset in alive:
                same[row.segment.token_ids[: 4 * int(row.sampled[offset])]].append((row, offset))
            alive = []
            for context, entries in same.items():
                if len(entries) > 1:
                    found[group, version, context] = [
                        (row, offset, int(ids[row.first][row.sampled[offset]])) for row, offset in entries
                    ]
                    alive += [(row, offset + 1) for row, offset in entries if offset + 1 < len(row.sampled)]
    return list(found.values())


def rounding_slope(engine: Tensor, processed: Tensor, rounded: Tensor) -> tuple[float, float]:
    """The slope of (engine - processed) over (rounded - processed) through 0, and its standard errors from 0.

    1 where the engine's head rounds as with the trainer's body, 0 where it does not round; body noise blurs it.
    """
    known = ~(engine.isnan() | processed.isnan() | rounded.isnan())
    r, d = (engine - processed)[known], (rounded - processed)[known]
    power = float(d.square().sum())
    if len(d) < 2 or power == 0:
        return 0.0, 0.0
    beta = float((r * d).sum()) / power
    error = float((r - beta * d).square().sum()) ** 0.5 / (power * (len(d) - 1)) ** 0.5
    return beta, beta / error if error > 0 else 0.0


def engine_head_sign(contexts: Contexts, slope: tuple[float, float]) -> str:
    """What says that the engine's head computes in bfloat16; empty where nothing does."""
    if contexts.is_grid:
        return str(contexts)
    beta, z = slope
    if beta >= _MIN_BETA and z >= _MIN_BETA_Z:
        return f"its residuals follow the rounding of bfloat16 logits with slope {beta:.2f}, z = {z:.0f}"
    return ""
