"""A reading that was computed, and how it is judged."""

from dataclasses import dataclass

import torch
from penstock.consumers.parity.gaps import gap_of, passes, without_worst
from penstock.consumers.parity.report import TOLERANCES, Gap, Hypothesis, Layer
from penstock.consumers.parity.verdict import Finding
from torch import Tensor

_BETTER = 0.7
"""A reading that explains a gap leaves at most so much of its mean."""
_MIN_Z = 4.0
"""In bfloat16 both readings may be within the noise of the body, and one has to be better than the other on average: by
so many standard errors."""
_CLEARLY_OFF = 5.0
"""Times the tolerance's mean."""


@dataclass(frozen=True)
class Candidate:
    """Logprobs under one reading, [M] float64, NaN for tokens it says nothing of.

    engine: the recorded values as this reading understands them; None takes them as they are.
    flips: share of the tokens that may be off, where a choice at a boundary falls either way.
    possible: False where something else rules it out. certain: True where something else proves it, and the gap need
        not have become smaller.
    note, detail: as in `Hypothesis` and `Finding`.
    """

    layer: Layer
    name: str
    says: str
    trainer: Tensor
    engine: Tensor | None = None
    flips: float = 0.0
    possible: bool = True
    certain: bool = False
    note: str = ""
    detail: str = ""


def judge(candidate: Candidate, engine: Tensor, null: Tensor, dtype: str) -> Finding:
    """engine, null: [M] float64, recorded and as processed."""
    meant = engine if candidate.engine is None else candidate.engine
    engine = torch.where(candidate.trainer.isnan() | meant.isnan(), torch.nan, engine)
    gap, baseline = gap_of(meant, candidate.trainer), gap_of(engine, null)
    trimmed = without_worst(meant, candidate.trainer, candidate.flips) if candidate.flips else gap
    explains = (
        candidate.possible
        and passes(trimmed, TOLERANCES[dtype])
        and (candidate.certain or _is_better(trimmed, baseline, meant - candidate.trainer, engine - null, dtype))
    )
    hypothesis = Hypothesis(
        layer=candidate.layer, name=candidate.name, says=candidate.says, gap=gap, note=candidate.note
    )
    return Finding(hypothesis, baseline, explains, candidate.detail)


def _is_better(gap: Gap, baseline: Gap, left: Tensor, before: Tensor, dtype: str) -> bool:
    if gap.mean > _BETTER * baseline.mean:
        return False
    # In float32 what passes has nothing left to explain: rounding alone may make one of two readings the closer one.
    return not passes(baseline, TOLERANCES[dtype]) if dtype == "float32" else _z(left, before) >= _MIN_Z


def _z(left: Tensor, before: Tensor) -> float:
    """By how many standard errors the mean size of `left` is below that of `before`, sizes cut where they leave any
    doubt: a few tokens that are far off must not be the whole of both mean and error."""
    cut = _CLEARLY_OFF * TOLERANCES["bfloat16"].mean
    better = before.abs().clamp(max=cut) - left.abs().clamp(max=cut)
    better = better[~better.isnan()]
    spread = float(better.std()) if len(better) > 1 else 0.0
    return float(better.mean()) * len(better) ** 0.5 / spread if spread > 0 else 0.0
