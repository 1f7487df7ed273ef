"""From the logprobs under each hypothesis to one verdict: measure the gap, judge each hypothesis, decide."""

import math
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from penstock.consumers.learning.loss.rows import LOG_RATIO_BOUND
from penstock.consumers.parity.confidence import MIN_ROLLOUTS
from penstock.consumers.parity.report import Hypothesis, Verdict, cause_of, layer_of
from penstock.consumers.parity.tolerance import TOLERANCES, YARDSTICKS, Excess, Gap, Tolerance, Yardstick

MIN_TOKENS = 16
"""With fewer tokens to compare the verdict is "unclear"."""
NO_GAP = Gap(num_tokens=0, mean=math.nan, p99=math.nan, max=math.nan, chi2=math.nan, ess_fraction=math.nan)
HEAD_TOLERANCE = Tolerance(mean=1e-4, p99=1e-3, max=1e-2)
"""Between the trainer's float32 head and one in float64 on equal hidden states: 2e-7 to 3e-6 nats were measured, a head
in TF32 or bfloat16 is off by 1e-3 and more."""
_BETTER = 0.7
"""A hypothesis that explains a gap leaves at most this share of its mean."""
_MIN_Z = 4.0
"""In 16 bits both gaps may be within the body's noise: one must be smaller by this many standard errors."""
_CLEARLY_OFF = 5.0
"""Times the tolerance's mean."""
_DISTINCT = 3.0
"""If two hypotheses explain the gap, the later one is chosen only if it leaves a gap this many times smaller."""
_OWN_NOISE = 0.3
"""The share of the gap that the engine's disagreement with itself must reach to be its cause."""


def gap_of(engine: Tensor, trainer: Tensor) -> Gap:
    """Returns the gap between [M] recorded and [M] recomputed logprobs over the tokens where neither is NaN.

    chi2 = <e^2c> - 1 and ess_fraction = (sum e^c)^2 / (M sum e^2c), with c = trainer - engine clamped to +-20.
    """
    difference = (trainer.double() - engine.double())[~(engine.isnan() | trainer.isnan())]
    if not len(difference):
        return NO_GAP
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
    """Returns the smallest value that `share` of [M] values do not exceed."""
    return float(values.kthvalue(max(1, math.ceil(share * len(values)))).values)


@dataclass(frozen=True)
class Candidate:
    """Logprobs under one hypothesis, [M] float64, NaN for tokens that it leaves out.

    name: in `CAUSES`, or "weights" with a distance.
    engine: the recorded values as this hypothesis interprets them; None leaves them as they are.
    flips: the share of the tokens that may be off because a choice at a boundary can go either way.
    possible: False if other evidence rules it out. certain: True if other evidence proves it, so that the gap need not
        be smaller.
    note, detail: as in `Hypothesis` and `JudgedHypothesis`.
    """

    name: str
    trainer: Tensor
    engine: Tensor | None = None
    flips: float = 0.0
    possible: bool = True
    certain: bool = False
    note: str = ""
    detail: str = ""


@dataclass(frozen=True)
class JudgedHypothesis:
    """A hypothesis, the gap of the baseline on the same tokens, and whether the hypothesis explains that gap.

    detail: an addition to the verdict in brackets, such as a fitted temperature.
    """

    hypothesis: Hypothesis
    baseline: Gap
    explains: bool
    detail: str = ""


def judge(
    candidate: Candidate, engine: Tensor, baseline: Tensor, tolerance: Tolerance, *, noisy: bool
) -> JudgedHypothesis:
    """Measures a candidate and decides whether it explains the gap.

    engine, baseline: [M] float64, the recorded logprobs and the trainer's. noisy: as in 16 bits, both gaps may be
        within the tolerance and yet tell the hypotheses apart.
    """
    meant = engine if candidate.engine is None else candidate.engine
    engine = torch.where(candidate.trainer.isnan() | meant.isnan(), torch.nan, engine)
    gap, before = gap_of(meant, candidate.trainer), gap_of(engine, baseline)
    trimmed = _without_worst(meant, candidate.trainer, candidate.flips) if candidate.flips else gap
    is_better = trimmed.mean <= _BETTER * before.mean
    if is_better and noisy:
        is_better = _z(meant - candidate.trainer, engine - baseline, _CLEARLY_OFF * tolerance.mean) >= _MIN_Z
    elif is_better:
        # In float32 a gap within the tolerance needs no explanation: rounding alone may make one of two the closer one.
        is_better = not tolerance.allows(before)
    explains = candidate.possible and tolerance.allows(trimmed) and (candidate.certain or is_better)
    hypothesis = Hypothesis(
        layer=layer_of(candidate.name),
        name=candidate.name,
        says=cause_of(candidate.name).says,
        gap=gap,
        note=candidate.note,
    )
    return JudgedHypothesis(hypothesis, before, explains, candidate.detail)


def _without_worst(engine: Tensor, trainer: Tensor, share: float) -> Gap:
    """Returns `gap_of` without the tokens of the largest gaps, at most `share` of all."""
    size = (trainer.double() - engine.double()).abs()
    known = size[~size.isnan()]
    num_left_out = int(share * len(known))
    if not num_left_out:
        return gap_of(engine, trainer)
    limit = known.kthvalue(len(known) - num_left_out).values
    return gap_of(torch.where(size <= limit, engine, torch.nan), trainer)


def _z(left: Tensor, removed: Tensor, cut: float) -> float:
    """Returns by how many standard errors the mean size of `left` is below that of `removed`.

    Sizes are clamped at a clear gap, `cut`: otherwise a few far tokens decide both the mean and its error.
    """
    better = removed.abs().clamp(max=cut) - left.abs().clamp(max=cut)
    better = better[~better.isnan()]
    spread = float(better.std()) if len(better) > 1 else 0.0
    return float(better.mean()) * len(better) ** 0.5 / spread if spread > 0 else 0.0


@dataclass(frozen=True)
class ParityMeasurements:
    """The input of `decide`.

    baseline: the recorded logprobs against the trainer's, all tokens, with those of earlier batches.
    lower: the lower ends of the baseline's figures; None if there are too few rollouts.
    num_rollouts: of the baseline.
    tolerance, yardstick: as in `ParityReport`.
    trainer_head: the trainer's logprobs against a plain head in float64 on the same hidden states.
    judged: semantics first.
    refused: the cause for which the trainer refuses such records however well they fit; empty if it accepts them.
    engine_head: the evidence that the engine's logits are 16-bit numbers; empty if there is none.
    spread: the engine against itself on equal contexts.
    sampling: the evidence that the tokens were drawn from another distribution than these logprobs; empty if none.
    """

    dtype: str
    baseline: Gap
    lower: Gap | None
    num_rollouts: int
    tolerance: Tolerance
    trainer_head: Gap
    yardstick: Yardstick | None = None
    judged: tuple[JudgedHypothesis, ...] = ()
    refused: str = ""
    engine_head: str = ""
    spread: Gap | None = None
    sampling: str = ""


def decide(found: ParityMeasurements) -> Verdict:
    """Returns the verdict by the first of these that holds: too few tokens; the trainer's own pass or head is off; a
    hypothesis explains the gap (semantics before inference); evidence that needs no gap; no explanation.

    A gap without explanation is a mismatch if its lower end is beyond the tolerance, and undecided if only the gap is.
    """
    baseline, tolerance = found.baseline, found.tolerance
    if baseline.num_tokens < MIN_TOKENS:
        return Verdict(
            status="unclear",
            cause="too few tokens",
            sentence=f"could not tell: {baseline.num_tokens} tokens to compare, at least {MIN_TOKENS} are needed",
            advice="check more rollouts",
        )
    if found.yardstick is not None and (excess := found.yardstick.packed_excess(found.dtype)) is not None:
        return _mismatch("trainer-pass", baseline, found.yardstick.packed, excess=excess)
    if (excess := HEAD_TOLERANCE.excess(found.trainer_head)) is not None:
        return _mismatch("trainer-head", baseline, found.trainer_head.mean, excess=excess)
    best, excess = _explanation(found.judged), tolerance.excess(baseline)
    if best is not None:
        return _mismatch(
            best.hypothesis.name, best.baseline, best.hypothesis.gap.mean, best.detail, tolerance.excess(best.baseline)
        )
    if excess is None and found.refused:
        return _mismatch(found.refused, baseline)
    if found.engine_head:
        return _mismatch("engine-head", baseline, detail=found.engine_head, excess=excess)
    if excess is None and found.sampling:
        return _mismatch("sampling", baseline, detail=found.sampling)
    if excess is None:
        return Verdict(status="parity", cause="parity", sentence=_parity(found))
    shown = None if found.lower is None else tolerance.excess(found.lower)
    if shown is None:
        return _undecided(found, excess)
    excess = shown._replace(value=getattr(baseline, shown.figure))
    if _is_own_noise(found.spread, baseline, tolerance):
        return _mismatch("engine-spread", baseline, found.spread.mean, excess=excess)
    return _mismatch("unexplained", baseline, excess=excess, lower=shown.value)


def _parity(found: ParityMeasurements) -> str:
    baseline, allowed = found.baseline, f"{found.tolerance.mean:.1e} is allowed in the mean"
    if found.tolerance.mean > TOLERANCES[found.dtype].mean and found.yardstick is not None:
        times = YARDSTICKS[found.dtype]
        allowed += f", {times:.0f} times what exact computations of this model differ by in {found.dtype}"
    return (
        f"parity: mean |engine - trainer| is {baseline.mean:.1e} nats over {baseline.num_tokens:,} tokens "
        f"(p99 {baseline.p99:.1e}, max {baseline.max:.1e}; {allowed})"
    )


def _undecided(found: ParityMeasurements, excess: Excess) -> Verdict:
    if found.lower is None:
        why = f"{found.num_rollouts} rollouts, at least {MIN_ROLLOUTS} are needed"
    else:
        why = (
            f"{found.baseline.num_tokens:,} tokens of {found.num_rollouts} rollouts, by which it may be as small as "
            f"{getattr(found.lower, excess.figure):.1e}"
        )
    return Verdict(
        status="unclear",
        cause="undecided",
        sentence=f"could not tell: |engine - trainer| has a {excess}, but over {why}",
        advice="check more rollouts",
    )


def _explanation(judged: tuple[JudgedHypothesis, ...]) -> JudgedHypothesis | None:
    """Returns the first hypothesis that explains the gap, or one of the same layer that leaves far less of it."""
    explaining = [each for each in judged if each.explains]
    if not explaining:
        return None
    same = [each for each in explaining if each.hypothesis.layer == explaining[0].hypothesis.layer]
    best = min(each.hypothesis.gap.mean for each in same)
    return next(each for each in same if each.hypothesis.gap.mean <= _DISTINCT * best)


def _is_own_noise(spread: Gap | None, baseline: Gap, tolerance: Tolerance) -> TypeGuard[Gap]:
    """Returns whether the engine's disagreement with itself is too large, and a large part of the gap."""
    if spread is None or not spread.num_tokens or tolerance.allows(spread):
        return False
    return spread.mean >= _OWN_NOISE * baseline.mean


def _mismatch(
    name: str,
    baseline: Gap,
    mean: float | None = None,
    detail: str = "",
    excess: Excess | None = None,
    lower: float | None = None,
) -> Verdict:
    """Returns a mismatch. mean: the gap under the cause. excess: the figure and the bound that decided, with its lower
    end."""
    cause = cause_of(name)
    residuals = f"residual {baseline.mean:.1e} as processed"
    if mean is not None:
        residuals += f", {mean:.1e} {cause.residual}"
    if excess is not None:
        least = "" if lower is None else f", at least {lower:.1e}"
        residuals += f" ({excess.figure} {excess.value:.1e}{least}; {excess.bound:.1e} is allowed)"
    return Verdict(
        status="mismatch",
        cause=name,
        sentence=f"{cause.opening}{f' ({detail})' if detail else ''}: {residuals}; {cause.advice}",
        advice=cause.advice,
    )
