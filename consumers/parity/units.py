"""Readings that need no logits beyond the processed ones: other units, rounded values, entries out of place."""

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from penstock.consumers.parity.candidate import Candidate
from penstock.consumers.parity.report import Tolerance
from penstock.consumers.parity.sample import Sample
from torch import Tensor

_MOVED = 3.0
"""Logprobs stand with the wrong sibling where another one's are so many times closer."""
_FAR, _MIN_LENGTH = 5.0, 4
"""Under body noise a row is off at so many times the tolerance, over so many tokens at least."""
_ROUNDED = 0.99
"""Share of the recorded values that must be bfloat16 numbers for the reading "rounded"."""
_FLIPS = 5e-3


def unit_candidates(engine: Tensor, processed: Tensor) -> Iterator[Candidate]:
    """engine, processed: [M] float64."""
    for name, says, factor in (
        ("log2", "logarithm to base 2", math.log(2)),
        ("log10", "logarithm to base 10", math.log(10)),
    ):
        yield Candidate(layer="semantics", name=name, says=says, trainer=processed, engine=engine * factor)
    yield Candidate(
        layer="semantics",
        name="probability",
        says="probability, no logarithm",
        trainer=processed,
        engine=engine.clamp(min=1e-300).log(),
        possible=bool((engine > 0).all()),
    )
    share = bfloat16_share(engine)
    yield Candidate(
        layer="semantics",
        name="rounded",
        says="rounded to bfloat16",
        trainer=torch.where(processed.isnan(), processed, processed.float().bfloat16().double()),
        flips=_FLIPS,
        possible=share >= _ROUNDED,
        certain=True,
        note=f"{share:.0%} of the recorded values are bfloat16 numbers",
    )


def bfloat16_share(engine: Tensor) -> float:
    """Share of the values other than 0 that bfloat16 holds exactly."""
    values = engine[engine != 0].float()
    return float((values.bfloat16().float() == values).double().mean()) if len(values) else 0.0


def shift_candidates(sample: Sample, processed: Tensor) -> Iterator[Candidate]:
    """Entries moved by one within their row; the token at the open end says nothing."""
    later, earlier = (torch.full_like(processed, torch.nan) for _ in range(2))
    later[1:], earlier[:-1] = processed[:-1], processed[1:]
    starts = [row.tokens.start for row in sample.rows]
    later[starts], earlier[[row.tokens.stop - 1 for row in sample.rows]] = torch.nan, torch.nan
    yield Candidate(layer="semantics", name="shifted+1", says="each of the token before", trainer=later)
    yield Candidate(layer="semantics", name="shifted-1", says="each of the token after", trainer=earlier)


def siblings_candidate(sample: Sample, processed: Tensor, tolerance: Tolerance, passing: bool) -> Candidate:
    """Each row's recorded logprobs with those of a sibling of equal length, where they are far closer.

    passing: the sample as a whole passes, so that only the groups of such rows count.
    """
    found, moved = processed.clone(), []
    noisy = tolerance.max is None
    allowed = _FAR * tolerance.mean if noisy else tolerance.mean
    for rows in _alike(sample):
        trainer = torch.stack([processed[sample.rows[r].tokens] for r in rows])
        engine = torch.stack([sample.engine[sample.rows[r].tokens] for r in rows])
        distance = (engine[:, None] - trainer[None]).abs().mean(-1)
        for n, r in enumerate(rows):
            own, closest = float(distance[n, n]), int(distance[n].argmin())
            too_short = noisy and len(sample.rows[r].sampled) < _MIN_LENGTH
            if own > allowed and float(distance[n, closest]) * _MOVED < own and not too_short:
                found[sample.rows[r].tokens] = trainer[closest]
                moved.append(sample.rows[r])
    if passing:
        groups = {row.group for row in moved}
        found[~sample.mask_of([row for row in sample.rows if row.group in groups])] = torch.nan
    return Candidate(
        layer="semantics",
        name="siblings",
        says="of another sibling of the group",
        trainer=found,
        possible=len(moved) > 0,
        certain=noisy,
        note=f"{len(moved)} of {len(sample.rows)} rows are closer to a sibling's logprobs",
        detail=f"{len(moved)} of {len(sample.rows)} rows",
    )


def _alike(sample: Sample) -> Iterator[list[int]]:
    """Rows of one group with equal numbers of tokens, of two siblings or more."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for r, row in enumerate(sample.rows):
        found[row.group, len(row.sampled)].append(r)
    return (rows for rows in found.values() if len({sample.rows[r].sibling for r in rows}) > 1)
