"""Which weights sampled the tokens, and whose keys and values they saw: the labels put to the test."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from penstock.consumers.parity.candidate import Candidate
from penstock.consumers.parity.gaps import gap_of, passes
from penstock.consumers.parity.policies import PolicyStore
from penstock.consumers.parity.replay import Replay, ReplayPlan, as_labelled
from penstock.consumers.parity.report import TOLERANCES, Gap
from penstock.consumers.parity.sample import Sample, SampleRow, evenly
from torch import Tensor

TOKENS_PER_VERSION = 512
"""Tokens that other weights are tried on, for each version whose tokens are off."""
MIXED_TOKENS = 1024
STALE_TOKENS = 16_384
"""Tokens, contexts included, of the rows that older prefixes are tried on; the worst rows come first."""
MAX_MOVE = 8
"""The farthest that a label's boundary is moved, in tokens."""
_OLDER, _NEWER = 3, 1
"""Published policies before and after the labelled one that are tried."""
_REACH = 16
"""How far apart in version number two policies in a row may be."""
_BLOCKS = (16, 32, 64, 128)
"""Tokens in a block of a prefix cache; vLLM's are 16 on GPU and 128 on CPU unless block_size says otherwise."""


class Versions:
    """Puts other weights behind the tokens of a sample.

    null: [M] float64, logprobs as labelled.
    """

    def __init__(self, sample: Sample, replay: Replay, policies: PolicyStore, null: Tensor) -> None:
        self._sample, self._replay, self._policies, self._null = sample, replay, policies, null
        self._tolerance = TOLERANCES[policies.dtype]
        known = sorted({int(version) for version in sample.versions})
        near = {version + step for version in known for step in range(-_REACH, _REACH + 1)}
        self.notes: list[str] = []
        self._published = sorted(version for version in near if policies.has(version))

    def weights(self) -> Iterator[Candidate]:
        """For every version whose tokens are off, the policies published around it."""
        mapping: dict[int, int] = {}
        by_step: dict[int, Tensor] = {}
        examined: dict[int, SampleRow] = {}
        for version in sorted({int(v) for v in self._sample.versions}):
            rows = self._rows_with(version)
            tokens = self._sample.mask_of(rows) & torch.from_numpy(self._sample.versions == version)
            now = self._relabelled(rows, mapping) if mapping else self._null
            found = {version: self._gap(now, tokens)}
            if passes(found[version], self._tolerance):
                continue
            examined |= {row.first: row for row in rows}
            for step, other in self._around(version):
                tried = self._relabelled(rows, {**mapping, version: other})
                found[other] = self._gap(tried, tokens)
                filled = by_step.setdefault(step, torch.full_like(self._null, torch.nan))
                filled[tokens] = tried[tokens]
            best = min(found, key=lambda other: found[other].mean)
            if best != version and passes(found[best], self._tolerance):
                mapping[version] = best
        steps = {self._step(version, other) for version, other in mapping.items()}
        name = f"weights{steps.pop():+d}" if len(steps) == 1 else "weights-other"
        for step, filled in sorted(by_step.items(), key=lambda each: (each[0] > 0, -each[0])):
            if f"weights{step:+d}" != name:
                yield Candidate("inference", f"weights{step:+d}", _step_in_words(step), filled, possible=False)
        if mapping:
            detail = ", ".join(f"labelled {v}, sampled by {other}" for v, other in sorted(mapping.items())[:4])
            yield Candidate(
                layer="inference",
                name=name,
                says="weights of another version than the labelled one",
                trainer=self._relabelled(list(examined.values()), mapping),
                note=detail,
                detail=detail,
            )

    def labels(self) -> Iterator[Candidate]:
        """Rows of several policies with the boundaries between them moved."""
        rows = self._worst([row for row in self._sample.rows if row.is_mixed], MIXED_TOKENS)
        if not rows:
            return
        tokens = self._sample.mask_of(rows)
        best: dict[str, tuple[float, int, Tensor]] = {}
        for move in [m for k in range(1, MAX_MOVE + 1) for m in (k, -k)]:
            tried = self._replay.logprobs(as_labelled(row, _moved(row.versions, move)) for row in rows)
            gap = self._gap(tried, tokens)
            name = "label-late" if move > 0 else "label-early"
            if name not in best or gap.mean < best[name][0]:
                best[name] = gap.mean, abs(move), tried
            if passes(gap, self._tolerance):
                break
        for name, (_, move, tried) in best.items():
            by = f"by {move} token{'s' * (move > 1)}"
            says = f"version labels {'late' if name == 'label-late' else 'early'} by some tokens"
            yield Candidate("inference", name, says, tried, note=by, detail=by)

    def recomputed(self) -> Iterator[Candidate]:
        """Rows of several policies, each token with keys and values of its own policy."""
        rows = self._worst([row for row in self._sample.rows if row.is_mixed], MIXED_TOKENS)
        plans = [
            ReplayPlan(row, ((version, 0, int(row.sampled[-1])),), wanted=row.versions == version)
            for row in rows
            for version in np.unique(row.versions).tolist()
        ]
        if plans:
            says = "keys and values computed anew after each update"
            yield Candidate("inference", "recomputed-kv", says, self._replay.logprobs(plans))

    def stale_prefix(self, block_size: int | None) -> Iterator[Candidate]:
        """Rows that are off, with whole blocks of their context computed by older weights.

        block_size: of the engine's prefix cache in tokens, where it is known.
        """
        rows = self._off(STALE_TOKENS)
        if not rows:
            return
        found, used = self._null.clone(), set()
        for trial in _trials(rows, self._sample.rows, (block_size,) if block_size else _BLOCKS):
            left = [row for row in rows if self._mean(found, row.tokens) > self._tolerance.mean]
            plans = [
                plan
                for row in left
                if row.first in trial.lengths
                and (plan := _with_older_prefix(row, self._older(row, trial.step), trial.lengths[row.first]))
            ]
            tried = self._replay.logprobs(plans)
            for plan in plans:
                part = plan.row.tokens
                if self._mean(tried, part) < self._mean(found, part):
                    found[part] = tried[part]
                    used.add(trial.lengths[plan.row.first])
        found[~self._sample.mask_of(rows)] = torch.nan
        blocks = sorted(used)
        yield Candidate(
            layer="inference",
            name="stale-prefix",
            says="whole blocks of the context with keys and values of older weights",
            trainer=found,
            possible=bool(used),
            note=f"prefixes of {', '.join(map(str, blocks[:6]))} tokens" if blocks else "",
        )

    def _rows_with(self, version: int) -> list[SampleRow]:
        """Rows of this policy alone where there are any, else mixed ones that it has a part in."""
        pure = [row for row in self._sample.rows if not row.is_mixed and row.versions[0] == version]
        some = pure or [row for row in self._sample.rows if (row.versions == version).any()]
        return [some[n] for n in evenly([len(row.sampled) for row in some], TOKENS_PER_VERSION)]

    def _worst(self, rows: Sequence[SampleRow], max_tokens: int) -> list[SampleRow]:
        """Rows of the largest mean gap and, for the other half of the tokens, rows spread evenly."""
        worst = sorted(rows, key=lambda row: -self._mean(self._null, row.tokens))
        chosen: dict[int, SampleRow] = {}
        held = 0
        for row in worst:
            if chosen and held + len(row.sampled) > max_tokens // 2:
                break
            chosen[row.first] = row
            held += len(row.sampled)
        rest = [row for row in rows if row.first not in chosen]
        if rest:
            chosen |= {rest[n].first: rest[n] for n in evenly([len(r.sampled) for r in rest], max_tokens // 2)}
        return [chosen[first] for first in sorted(chosen)]

    def _off(self, max_tokens: int) -> list[SampleRow]:
        """Rows whose mean gap is above the tolerance, the worst first; of at most `max_tokens` in all, or one row."""
        off = [row for row in self._sample.rows if self._mean(self._null, row.tokens) > self._tolerance.mean]
        off.sort(key=lambda row: -self._mean(self._null, row.tokens))
        total = np.cumsum([len(row.token_ids) for row in off])
        return off[: max(1, int((total <= max_tokens).sum()))]

    def _mean(self, logprobs: Tensor, part: slice) -> float:
        return float((self._sample.engine[part] - logprobs[part]).abs().nanmean())

    def _gap(self, logprobs: Tensor, tokens: Tensor) -> Gap:
        return gap_of(self._sample.engine[tokens], logprobs[tokens])

    def _relabelled(self, rows: Sequence[SampleRow], mapping: Mapping[int, int]) -> Tensor:
        return self._replay.logprobs(
            as_labelled(row, np.array([mapping.get(version, version) for version in row.versions.tolist()]))
            for row in rows
        )

    def _around(self, version: int) -> list[tuple[int, int]]:
        """(step, version): the policies published before and after, nearest first."""
        older = [other for other in self._published if other < version][-_OLDER:]
        newer = [other for other in self._published if other > version][:_NEWER]
        return [(-n, other) for n, other in enumerate(reversed(older), 1)] + list(enumerate(newer, 1))

    def _step(self, version: int, other: int) -> int:
        return next(step for step, around in self._around(version) if around == other)

    def _older(self, row: SampleRow, step: int) -> int | None:
        return next((other for n, other in self._around(int(row.versions[0])) if n == -step), None)


def _moved(versions: np.ndarray, move: int) -> np.ndarray:
    """[m] versions with every boundary `move` tokens earlier; later where it is negative."""
    places = np.clip(np.arange(len(versions)) + move, 0, len(versions) - 1)
    return versions[places]


def _with_older_prefix(row: SampleRow, older: int | None, length: int) -> ReplayPlan | None:
    plan = as_labelled(row)
    if older is None or length >= row.start:
        return None
    (version, _, end), *rest = plan.spans
    return ReplayPlan(row, ((older, 0, length), (version, length, end), *rest))


class _Trial(NamedTuple):
    """Stale prefixes to try at once. lengths: by a row's first token, in tokens. step: policies back."""

    lengths: dict[int, int]
    step: int


def _trials(rows: Sequence[SampleRow], all_rows: Sequence[SampleRow], blocks: Sequence[int]) -> Iterator[_Trial]:
    """Of each row's context the whole blocks: all of it, and what it shares with the nearest and with every other
    group's. No row gets one length twice."""
    shared = _shared_prefixes(rows, all_rows)
    tried: set[tuple[int, int, int]] = set()
    for block in blocks:
        for which in range(3):
            for step in range(1, _OLDER + 1):
                lengths = {}
                for row in rows:
                    length = (row.start - 1, *shared[row.group])[which] // block * block
                    if length and (row.first, length, step) not in tried:
                        tried.add((row.first, length, step))
                        lengths[row.first] = length
                if lengths:
                    yield _Trial(lengths, step)


def _shared_prefixes(rows: Sequence[SampleRow], all_rows: Sequence[SampleRow]) -> dict[int, tuple[int, int]]:
    """By group of `rows`, the tokens that its context shares with the nearest other group's and with every other's; 0
    where there is no other."""
    contexts = {row.group: row.token_ids[: row.start] for row in all_rows}
    found = {}
    for group in {row.group for row in rows}:
        lengths = [_shared_prefix(contexts[group], other) for name, other in contexts.items() if name != group]
        found[group] = max(lengths, default=0), min(lengths, default=0)
    return found


def _shared_prefix(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size


def _step_in_words(step: int) -> str:
    side = "before" if step < 0 else "after"
    return f"weights published {abs(step)} version{'s' * (abs(step) > 1)} {side} the labelled one"
