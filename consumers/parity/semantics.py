"""Hypotheses on the meaning of the recorded numbers: another convention, another unit, misplaced entries."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from penstock.consumers.parity.conventions import CONVENTIONS, Convention, at_temperatures, under_conventions
from penstock.consumers.parity.replay import Replay
from penstock.consumers.parity.sample import Sample, SampleRow, evenly_and_worst
from penstock.consumers.parity.sampled_tokens import fits_better, fitted_temperatures, sampling_test
from penstock.consumers.parity.tolerance import Gap
from penstock.consumers.parity.verdict import Candidate, gap_of

MAX_TOKENS = 8192
"""The most sampled tokens whose logits are computed."""
_MAX_LOGITS = 1 << 27
"""The most logits in total, so that a large vocabulary does not take minutes."""
_FLIPS = 5e-3
"""The share of tokens that may fall on the other side of a top-p boundary or of a rounding to 16 bits."""
_ROUNDING_FLIPS = 5e-2
"""The share of tokens with a logit that may be rounded the other way."""
_SAME_TEMPERATURE = 5e-3
"""Temperatures whose relative difference is this small are equal."""
_MOVED = 3.0
"""Logprobs belong to another sibling if its own are this many times closer."""
_FAR, _MIN_LENGTH = 5.0, 4
"""Under body noise a row is off at this many times the tolerance, over at least this many tokens."""
_ROUNDED = 0.99
"""Share of the recorded values that must be 16-bit numbers for the hypothesis "rounded"."""


class SemanticHypotheses:
    """Computes the logits of all rows if they are few; otherwise of some, half spread evenly and half the worst.

    baseline: [M] float64, as the trainer computes it. passing: it is within the tolerance.
    """

    def __init__(self, replay: Replay, baseline: Tensor, passing: bool) -> None:
        self._replay, self._sample, self._baseline, self._passing = replay, replay.sample, baseline, passing
        budget = max(1, min(MAX_TOKENS, _MAX_LOGITS // replay.policies.vocabulary))
        self._fair, self._rows = _chosen(self._sample, baseline, budget)
        self.notes: list[str] = []
        num_read = sum(len(row.sampled) for row in self._rows)
        if num_read < self._sample.num_tokens:
            self.notes.append(
                f"hypotheses that need logits were tried on {num_read:,} of {self._sample.num_tokens:,} tokens"
            )
        self._found = under_conventions(replay, self._rows, self._conventions())
        processed = self._found["processed"]
        self.trainer_head: Gap = gap_of(self._found["trainer"], processed)
        """The trainer's head against that one, on equal hidden states: those of another pass differ in bfloat16."""
        self._test = sampling_test(self._found["moments"], processed, self._fair)

    @property
    def suspicion(self) -> str:
        """The evidence that the tokens were drawn from another distribution; empty if there is none."""
        return str(self._test) if self._test is not None and self._test.is_suspicious else ""

    def candidates(self) -> Iterator[Candidate]:
        yield from self._by_temperature()
        for name, flips in (("penalties", 0.0), ("kept-support", _FLIPS), ("whole-vocabulary", 0.0)):
            if name in self._found:
                yield Candidate(name, self._found[name], flips=flips)
        yield from _in_another_unit(self._sample.engine, self._baseline)
        yield from _shifted(self._sample, self._baseline)
        yield self._of_siblings()
        yield Candidate("engine-head", self._found["engine-head"], flips=_ROUNDING_FLIPS)

    def _conventions(self) -> dict[str, Convention]:
        names = ["processed", "trainer", "raw", "engine-head", "moments"]
        if any(row.sampling.has_penalties for row in self._rows):
            names.append("penalties")
        if any(row.lacks_mask for row in self._rows):
            names.append("kept-support")
        if any(row.segment.sampling_mask is not None for row in self._rows):
            names.append("whole-vocabulary")
        return {name: CONVENTIONS[name] for name in names}

    def _by_temperature(self) -> Iterator[Candidate]:
        """Yields raw logprobs and another temperature. The sampled tokens distinguish them where the numbers cannot."""
        raw = Candidate("raw", self._found["raw"])
        if self._passing:
            yield raw
            return
        fitted = fitted_temperatures(self._replay, self._rows)
        found = under_conventions(self._replay, self._rows, at_temperatures(fitted))
        test = sampling_test(found["moments"], found["temperature"], self._fair)
        is_one = all(abs(temperature - 1) <= _SAME_TEMPERATURE for temperature in fitted.values())
        drawn_there, drawn_as_recorded = fits_better(test, self._test), fits_better(self._test, test)
        if is_one and drawn_there:
            raw = replace(raw, possible=False, note=f"the tokens were drawn there: {test}")
        elif is_one and not drawn_as_recorded:
            raw = replace(raw, detail="or the temperature is recorded wrong: too few tokens to tell")
        yield raw
        pairs = ", ".join(f"{new:.3g} where {old:.3g} is recorded" for old, new in fitted.items())
        if test is None or self._test is None:
            how = ""
        elif drawn_there:
            how = ", and the tokens were drawn there"
        elif drawn_as_recorded:
            how = ", but the tokens were drawn at the recorded one"
        else:
            how = ", too few tokens to tell which one they were drawn at"
        yield Candidate(
            "temperature",
            found["temperature"],
            possible=any(abs(new - old) > _SAME_TEMPERATURE * old for old, new in fitted.items()),
            note=f"{pairs}; {test}" if test is not None else pairs,
            detail=pairs + how,
        )

    def _of_siblings(self) -> Candidate:
        """Compares each row's recorded logprobs with those of the sibling of equal length that is far closer, if any.

        If the sample as a whole passes, only the groups of such rows count.
        """
        sample, tolerance = self._sample, self._replay.tolerance
        found, moved = self._baseline.clone(), []
        noisy = tolerance.max is None
        allowed = _FAR * tolerance.mean if noisy else tolerance.mean
        for rows in _alike(sample):
            trainer = torch.stack([self._baseline[sample.rows[r].tokens] for r in rows])
            engine = torch.stack([sample.engine[sample.rows[r].tokens] for r in rows])
            distance = (engine[:, None] - trainer[None]).abs().mean(-1)
            for n, r in enumerate(rows):
                own, closest = float(distance[n, n]), int(distance[n].argmin())
                too_short = noisy and len(sample.rows[r].sampled) < _MIN_LENGTH
                if own > allowed and float(distance[n, closest]) * _MOVED < own and not too_short:
                    found[sample.rows[r].tokens] = trainer[closest]
                    moved.append(sample.rows[r])
        if self._passing:
            groups = {row.group for row in moved}
            found[~sample.mask_of([row for row in sample.rows if row.group in groups])] = torch.nan
        detail = f"{len(moved)} of {len(sample.rows)} rows"
        note = f"{detail} are closer to a sibling's logprobs"
        return Candidate("siblings", found, possible=len(moved) > 0, certain=noisy, note=note, detail=detail)


def _alike(sample: Sample) -> Iterator[list[int]]:
    """Returns indexes of rows in one group with equal numbers of tokens, from two siblings or more."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for r, row in enumerate(sample.rows):
        found[row.group, len(row.sampled)].append(r)
    return (rows for rows in found.values() if len({sample.rows[r].sibling for r in rows}) > 1)


def _in_another_unit(engine: Tensor, baseline: Tensor) -> Iterator[Candidate]:
    yield Candidate("log2", baseline, engine * math.log(2))
    yield Candidate("log10", baseline, engine * math.log(10))
    yield Candidate("probability", baseline, engine.clamp(min=1e-300).log(), possible=bool((engine > 0).all()))
    shares = {dtype: _share_in(dtype, engine) for dtype in (torch.bfloat16, torch.float16)}
    dtype = max(shares, key=lambda each: min(shares[each], _ROUNDED))  # most bfloat16 numbers are float16 numbers too
    yield Candidate(
        "rounded",
        torch.where(baseline.isnan(), baseline, baseline.float().to(dtype).double()),
        flips=_FLIPS,
        possible=shares[dtype] >= _ROUNDED,
        certain=True,
        note=f"{shares[dtype]:.0%} of the recorded values are {str(dtype).removeprefix('torch.')} numbers",
    )


def _share_in(dtype: torch.dtype, engine: Tensor) -> float:
    """Returns the share of the values other than 0 that `dtype` holds exactly."""
    values = engine[engine != 0].float()
    return float((values.to(dtype).float() == values).double().mean()) if len(values) else 0.0


def _shifted(sample: Sample, baseline: Tensor) -> Iterator[Candidate]:
    """Yields entries moved by one within their row, without the token at the open end."""
    later, earlier = (torch.full_like(baseline, torch.nan) for _ in range(2))
    later[1:], earlier[:-1] = baseline[:-1], baseline[1:]
    later[[row.tokens.start for row in sample.rows]] = torch.nan
    earlier[[row.tokens.stop - 1 for row in sample.rows]] = torch.nan
    yield Candidate("shifted+1", later)
    yield Candidate("shifted-1", earlier)


def _chosen(sample: Sample, baseline: Tensor, budget: int) -> tuple[list[SampleRow], list[SampleRow]]:
    """Returns the rows of groups spread evenly, and these with the rows of the worst groups."""
    groups: dict[int, list[SampleRow]] = {}
    for row in sample.rows:
        groups.setdefault(row.group, []).append(row)
    by_group, gap = list(groups.values()), (sample.engine - baseline).abs()
    sizes = [sum(len(row.sampled) for row in rows) for rows in by_group]
    gaps = [float(torch.cat([gap[row.tokens] for row in rows]).mean()) for rows in by_group]
    fair, chosen = evenly_and_worst(sizes, gaps, budget)
    return [row for place in fair for row in by_group[place]], [row for place in chosen for row in by_group[place]]
