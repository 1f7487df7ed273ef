"""The readings of one sample that logits decide: what the numbers mean, and what was sampled."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from penstock.consumers.parity import readings
from penstock.consumers.parity.candidate import Candidate
from penstock.consumers.parity.gaps import gap_of
from penstock.consumers.parity.replay import Replay
from penstock.consumers.parity.report import TOLERANCES, Gap
from penstock.consumers.parity.sample import Sample, SampleRow, evenly
from penstock.consumers.parity.sampling_fit import TELLING_Z, Draw, draw, fitted_temperatures
from penstock.consumers.parity.units import shift_candidates, siblings_candidate, unit_candidates
from torch import Tensor

MAX_TOKENS = 8192
"""Sampled tokens whose logits are read."""
_MAX_LOGITS = 1 << 27
"""And logits in all, so that a large vocabulary does not take minutes."""
_FLIPS = 5e-3
"""Share of tokens whose top-p boundary may fall the other way."""
_ROUNDING_FLIPS = 5e-2
"""Share of tokens that may see a logit rounded the other way."""
_SAME_TEMPERATURE = 5e-3
"""Fitted temperatures this close, relative, are one."""


class Meanings:
    """Reads the logits of some rows: all where they are few, else half of them spread evenly and half the worst.

    null: [M] float64, as the trainer computes it. passing: it is within the tolerance.
    """

    def __init__(
        self, sample: Sample, replay: Replay, null: Tensor, vocabulary: int, passing: bool, dtype: str
    ) -> None:
        self._sample, self._replay, self._null, self._passing = sample, replay, null, passing
        self._tolerance = TOLERANCES[dtype]
        self._fair, self._rows = _chosen(sample, null, max(1, min(MAX_TOKENS, _MAX_LOGITS // vocabulary)))
        self.notes: list[str] = []
        num_read = sum(len(row.sampled) for row in self._rows)
        if num_read < sample.num_tokens:
            self.notes.append(f"readings that need logits were tried on {num_read:,} of {sample.num_tokens:,} tokens")
        self._truncated = any(r.sampling.is_truncated and r.segment.sampling_mask is None for r in self._rows)
        self._penalised = any(r.sampling.has_penalties for r in self._rows)
        self._masked = any(r.segment.sampling_mask is not None for r in self._rows)
        self._cold = any(r.sampling.temperature != 1.0 for r in self._rows)
        self._read = readings.read(sample, replay, self._rows, self._readers())
        self.processed: Tensor = self._read["processed"]
        """[M] float64 by a plain head in float64, NaN for rows not read."""
        self.bfloat16_head: Tensor = self._read["engine-head"]
        self.trainer_head: Gap = gap_of(self._read["trainer"], self.processed)
        """The trainer's head against that one. On equal hidden states: in bfloat16 those of another pass differ."""
        self._drawn = draw(sample, self._read["moments"], self.processed, self._fair)

    @property
    def suspicion(self) -> str:
        """What says that the tokens were drawn from another distribution; empty where nothing does."""
        return str(self._drawn) if self._drawn is not None and self._drawn.is_suspicious else ""

    def candidates(self) -> Iterator[Candidate]:
        yield from self._of_temperature()
        if self._penalised:
            yield self._candidate("penalties", "with the recorded penalties")
        if self._truncated:
            yield self._candidate("kept-support", "over what top-k and top-p keep", _FLIPS)
        if self._masked:
            yield self._candidate("whole-vocabulary", "over the whole vocabulary, not the sampling_mask")
        yield from unit_candidates(self._sample.engine, self._null)
        yield from shift_candidates(self._sample, self._null)
        yield siblings_candidate(self._sample, self._null, self._tolerance, self._passing)
        yield Candidate(
            layer="inference",
            name="engine-head",
            says="by a head that rounds logits to bfloat16",
            trainer=self.bfloat16_head,
            flips=_ROUNDING_FLIPS,
        )

    def _readers(self) -> dict[str, readings.Reader]:
        ones = {row.sampling.temperature: 1.0 for row in self._rows}
        found: dict[str, readings.Reader] = {
            "processed": readings.processed,
            "trainer": readings.by_trainer,
            "raw": readings.raw,
            "engine-head": readings.bfloat16_head,
            "moments": readings.moments(),
        }
        if self._cold:
            found["raw moments"] = readings.moments(ones)
        if self._penalised:
            found["penalties"] = readings.penalised
        if self._truncated:
            found["kept-support"] = readings.kept_support
        if self._masked:
            found["whole-vocabulary"] = readings.whole_vocabulary
        return found

    def _candidate(self, name: str, says: str, flips: float = 0.0) -> Candidate:
        return Candidate(layer="semantics", name=name, says=says, trainer=self._read[name], flips=flips)

    def _of_temperature(self) -> Iterator[Candidate]:
        """Raw logprobs and another temperature, which what was sampled tells apart where the numbers cannot."""
        raw = self._candidate("raw", "at temperature 1, before top-k, top-p and penalties")
        if self._passing:
            yield raw
            return
        fitted = fitted_temperatures(self._sample, self._replay, self._rows)
        found = readings.read(
            self._sample,
            self._replay,
            self._rows,
            {"temperature": readings.at_temperatures(fitted), "moments": readings.moments(fitted)},
        )
        drawn = draw(self._sample, found["moments"], found["temperature"], self._fair)
        is_one = all(abs(temperature - 1) <= _SAME_TEMPERATURE for temperature in fitted.values())
        drawn_there = _closer(drawn, self._drawn)
        if is_one and drawn_there:
            raw = replace(raw, possible=False, note=f"the tokens were drawn there: {drawn}")
        elif is_one and not _closer(self._drawn, drawn):
            raw = replace(raw, detail="or the temperature is recorded wrong: too few tokens to tell")
        yield raw
        pairs = ", ".join(f"{new:.3g} where {old:.3g} is recorded" for old, new in fitted.items())
        if drawn is None or self._drawn is None:
            how = ""
        elif drawn_there:
            how = ", and the tokens were drawn there"
        elif _closer(self._drawn, drawn):
            how = ", but the tokens were drawn at the recorded one"
        else:
            how = ", too few tokens to tell which one they were drawn at"
        yield Candidate(
            layer="semantics",
            name="temperature",
            says="at another temperature",
            trainer=found["temperature"],
            possible=any(abs(new - old) > _SAME_TEMPERATURE * old for old, new in fitted.items()),
            note=f"{pairs}; {drawn}" if drawn is not None else pairs,
            detail=pairs + how,
        )


def _closer(one: Draw | None, other: Draw | None) -> bool:
    """Whether the tokens are a fair draw from the first and none from the second."""
    return one is not None and other is not None and abs(other.z) >= TELLING_Z and 2 * abs(one.z) < abs(other.z)


def _chosen(sample: Sample, null: Tensor, budget: int) -> tuple[list[SampleRow], list[SampleRow]]:
    """Rows spread evenly over the groups, and those with the rows of the groups that are off most; `budget` tokens in
    all, or one group."""
    groups: dict[int, list[SampleRow]] = {}
    for row in sample.rows:
        groups.setdefault(row.group, []).append(row)
    by_group = list(groups.values())
    sizes = [sum(len(row.sampled) for row in rows) for rows in by_group]
    if sum(sizes) <= budget:
        return list(sample.rows), list(sample.rows)
    places = evenly(sizes, budget // 2)
    gaps = [float(torch.cat([(sample.engine - null)[row.tokens].abs() for row in rows]).mean()) for rows in by_group]
    fair = [row for place in places for row in by_group[place]]
    chosen, held = set(places), sum(sizes[place] for place in places)
    for place in sorted(range(len(by_group)), key=lambda place: -gaps[place]):
        if place not in chosen and held + sizes[place] <= budget:
            chosen.add(place)
            held += sizes[place]
    return fair, [row for place in sorted(chosen) for row in by_group[place]]
