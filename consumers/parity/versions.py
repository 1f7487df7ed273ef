"""Hypotheses on the weights behind the tokens: other versions, moved labels, keys and values of other versions."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.parity.replay import Replay, ReplayPlan, as_labelled, whole
from penstock.consumers.parity.sample import SampleRow, evenly, evenly_and_worst
from penstock.consumers.parity.tolerance import Gap
from penstock.consumers.parity.verdict import Candidate, gap_of

TOKENS_PER_VERSION = 512
"""The most tokens that other weights are tried on, for each version with a gap."""
MIXED_TOKENS = 1024
STALE_TOKENS = 16_384
"""The most tokens, including contexts, of the rows that older prefixes are tried on; the worst rows come first."""
MAX_MOVE = 8
"""The longest move of a label's boundary, in tokens."""
_OLDER, _NEWER = 3, 1
"""Published policies before and after the labelled one that are tried."""
_REACH = 16
"""The largest distance in version number between two successive policies."""
_BLOCKS = (16, 32, 64, 128)
"""Tokens in a block of a prefix cache; vLLM's default block_size is 16 on GPU and 128 on CPU."""


class VersionHypotheses:
    """Recomputes the tokens of a sample with other weights than their labels say.

    baseline: [M] float64, as the trainer computes it. block_size: of the engine's prefix cache in tokens, if known.
    """

    def __init__(self, replay: Replay, baseline: Tensor, block_size: int | None) -> None:
        self._replay, self._sample, self._baseline = replay, replay.sample, baseline
        self._blocks = (block_size,) if block_size else _BLOCKS
        self._tolerance = replay.tolerance
        self._near: dict[int, list[tuple[int, int]]] = {}

    def candidates(self) -> Iterator[Candidate]:
        mixed = [row for row in self._sample.rows if row.is_mixed]
        sizes, gaps = [len(row.sampled) for row in mixed], [self._mean_gap(row) for row in mixed]
        mixed = [mixed[n] for n in evenly_and_worst(sizes, gaps, MIXED_TOKENS)[1]]
        yield from self._weights()
        if mixed:
            yield from self._labels(mixed)
        yield from self._stale_prefix()
        if mixed:
            yield self._recomputed(mixed)

    def _weights(self) -> Iterator[Candidate]:
        """Tries, for every version with a gap, the policies published around it."""
        served: dict[int, int] = {}
        """The policy that sampled the tokens of a version, where it is another one."""
        examined: dict[int, SampleRow] = {}
        for version in sorted({int(v) for v in self._sample.versions}):
            rows = self._rows_with(version)
            tokens = self._sample.mask_of(rows) & torch.from_numpy(self._sample.versions == version)
            gap = self._gap(self._relabelled(rows, served) if served else self._baseline, tokens)
            if self._tolerance.allows(gap):
                continue
            examined |= {row.first: row for row in rows}
            gaps = {
                other: self._gap(self._relabelled(rows, {**served, version: other}), tokens)
                for _, other in self._around(version)
            }
            best = min(gaps, key=lambda other: gaps[other].mean, default=version)
            if best != version and gaps[best].mean < gap.mean and self._tolerance.allows(gaps[best]):
                served[version] = best
        if served:
            steps = {self._step(version, other) for version, other in served.items()}
            name = f"weights{steps.pop():+d}" if len(steps) == 1 else "weights-other"
            detail = ", ".join(f"labelled {v}, sampled by {other}" for v, other in sorted(served.items())[:4])
            trainer = self._relabelled(list(examined.values()), served)
            yield Candidate(name, trainer, note=detail, detail=detail)

    def _labels(self, rows: Sequence[SampleRow]) -> Iterator[Candidate]:
        """Moves the boundaries in rows of several policies."""
        tokens = self._sample.mask_of(rows)
        best: dict[str, tuple[float, int, Tensor]] = {}
        for move in [m for k in range(1, MAX_MOVE + 1) for m in (k, -k)]:
            tried = self._replay.logprobs(as_labelled(row, _moved(row.versions, move)) for row in rows)
            gap = self._gap(tried, tokens)
            name = "label-late" if move > 0 else "label-early"
            if name not in best or gap.mean < best[name][0]:
                best[name] = gap.mean, abs(move), tried
            if self._tolerance.allows(gap):
                break
        for name, (_, move, tried) in best.items():
            by = f"by {move} token{'s' * (move > 1)}"
            yield Candidate(name, tried, note=by, detail=by)

    def _recomputed(self, rows: Sequence[SampleRow]) -> Candidate:
        """Computes each token of rows of several policies with keys and values of its own policy."""
        found = torch.full_like(self._baseline, torch.nan)
        for version in sorted({int(version) for row in rows for version in row.versions}):
            tried = self._replay.logprobs(whole(row, version) for row in rows if version in row.versions)
            tokens = torch.from_numpy(self._sample.versions == version)
            found[tokens] = tried[tokens]
        return Candidate("recomputed-kv", found)

    def _stale_prefix(self) -> Iterator[Candidate]:
        """Computes whole blocks of the contexts of rows that are off by older weights."""
        rows = self._off(STALE_TOKENS)
        if not rows:
            return
        closest, used = self._baseline.clone(), set()
        for step, lengths in _prefix_trials(rows, self._sample.rows, self._blocks):
            plans = [
                _with_older_prefix(row, older, lengths[row.first])
                for row in rows
                if row.first in lengths
                and self._mean(closest, row.tokens) > self._tolerance.mean
                and (older := self._older(row, step)) is not None
            ]
            tried = self._replay.logprobs(plans)
            for plan in plans:
                part = plan.row.tokens
                if self._mean(tried, part) < self._mean(closest, part):
                    closest[part] = tried[part]
                    used.add(lengths[plan.row.first])
        closest[~self._sample.mask_of(rows)] = torch.nan
        blocks = sorted(used)
        note = f"prefixes of {', '.join(map(str, blocks[:6]))} tokens" if blocks else ""
        yield Candidate("stale-prefix", closest, possible=bool(used), note=note)

    def _rows_with(self, version: int) -> list[SampleRow]:
        """Returns rows that this policy sampled alone; if there are none, those that it sampled in part."""
        pure = [row for row in self._sample.rows if not row.is_mixed and row.versions[0] == version]
        some = pure or [row for row in self._sample.rows if (row.versions == version).any()]
        return [some[n] for n in evenly([len(row.sampled) for row in some], TOKENS_PER_VERSION)]

    def _off(self, max_tokens: int) -> list[SampleRow]:
        """Returns rows with a mean gap above the tolerance, the worst first; at most `max_tokens` in all, or a row."""
        off = [row for row in self._sample.rows if self._mean_gap(row) > self._tolerance.mean]
        off.sort(key=self._mean_gap, reverse=True)
        total = np.cumsum([len(row.token_ids) for row in off])
        return off[: max(1, int((total <= max_tokens).sum()))]

    def _mean(self, logprobs: Tensor, part: slice) -> float:
        return float((self._sample.engine[part] - logprobs[part]).abs().nanmean())

    def _mean_gap(self, row: SampleRow) -> float:
        return self._mean(self._baseline, row.tokens)

    def _gap(self, logprobs: Tensor, tokens: Tensor) -> Gap:
        return gap_of(self._sample.engine[tokens], logprobs[tokens])

    def _relabelled(self, rows: Sequence[SampleRow], mapping: Mapping[int, int]) -> Tensor:
        return self._replay.logprobs(
            as_labelled(row, np.array([mapping.get(version, version) for version in row.versions.tolist()]))
            for row in rows
        )

    def _around(self, version: int) -> list[tuple[int, int]]:
        """Returns (step, version) of the policies published before and after, nearest first. Looks at no others: each
        one's weights may have to be written."""
        if version not in self._near:
            has = self._replay.policies.has
            older = islice(filter(has, range(version - 1, version - _REACH - 1, -1)), _OLDER)
            newer = islice(filter(has, range(version + 1, version + _REACH + 1)), _NEWER)
            self._near[version] = [(-n, other) for n, other in enumerate(older, 1)] + list(enumerate(newer, 1))
        return self._near[version]

    def _step(self, version: int, other: int) -> int:
        return next(step for step, around in self._around(version) if around == other)

    def _older(self, row: SampleRow, step: int) -> int | None:
        return next((other for n, other in self._around(int(row.versions[0])) if n == -step), None)


def _moved(versions: np.ndarray, move: int) -> np.ndarray:
    """Returns [m] versions with every boundary `move` tokens earlier, or later if it is negative."""
    places = np.clip(np.arange(len(versions)) + move, 0, len(versions) - 1)
    return versions[places]


def _with_older_prefix(row: SampleRow, older: int, length: int) -> ReplayPlan:
    (version, _, end), *rest = as_labelled(row).spans
    return ReplayPlan(row, ((older, 0, length), (version, length, end), *rest))


def _prefix_trials(
    rows: Sequence[SampleRow], all_rows: Sequence[SampleRow], blocks: Sequence[int]
) -> Iterator[tuple[int, dict[int, int]]]:
    """Yields stale prefixes to try at once: the number of policies back, and lengths in tokens by `SampleRow.first`.

    They are the whole blocks of each row's context, and of the parts that it shares with the nearest other group's and
    with every other group's. No row gets a length twice.
    """
    contexts = {row.group: row.token_ids[: row.start] for row in all_rows}
    lengths: dict[int, list[int]] = {}
    for row in rows:
        own = row.token_ids[: row.start - 1]
        shared = [_shared_prefix(own, other) for group, other in contexts.items() if group != row.group] or [0]
        parts = len(own), max(shared), min(shared)
        lengths[row.first] = list(dict.fromkeys(p // block * block for block in blocks for p in parts if p >= block))
    for n in range(max(map(len, lengths.values()))):
        for step in range(1, _OLDER + 1):
            yield step, {first: some[n] for first, some in lengths.items() if n < len(some)}


def _shared_prefix(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size
