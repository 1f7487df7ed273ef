"""The sampled tokens of some groups as one table, by the requests that the engine served."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from msgspec import UNSET
from torch import Tensor

from penstock.consumers.parity.report import ParityError
from penstock.schemas.policy import UNKNOWN_VERSION
from penstock.schemas.rollout import RolloutGroup, SamplingSettings, Segment, VersionSpan


@dataclass(frozen=True)
class SampleRow:
    """One request as the engine served it: a context, then m sampled tokens.

    If several policies sampled the turns of a segment, each turn makes a row: it is a request of its own that computes
    the whole context again.

    group, sibling: index among the groups given, and within the group.
    segment: ends with its last sampled token.
    sampled: [m] int64, places of the sampled tokens in the segment; contiguous unless one policy sampled all.
    versions: [m] int64.
    first: the row's tokens are `first : first + m` of the sample.
    before: the number of sampled tokens in the rollout's earlier rows.
    files: the group's images by digest.
    """

    group: int
    sibling: int
    segment: Segment
    sampling: SamplingSettings
    sampled: np.ndarray
    versions: np.ndarray
    first: int
    before: int
    files: Mapping[str, bytes]

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + len(self.sampled))

    @property
    def token_ids(self) -> np.ndarray:
        """[n] int64, context and sampled."""
        return np.frombuffer(self.segment.token_ids, dtype=np.int32).astype(np.int64)

    @property
    def start(self) -> int:
        """The place of the first sampled token."""
        return int(self.sampled[0])

    @property
    def lacks_mask(self) -> bool:
        """True if top-k or top-p dropped tokens and the record does not say which."""
        return self.sampling.is_truncated and self.segment.sampling_mask is None

    @property
    def is_mixed(self) -> bool:
        """True if several policies sampled it."""
        return bool((self.versions != self.versions[0]).any())


@dataclass(frozen=True)
class Sample:
    """M sampled tokens.

    engine: [M] float64, the recorded logprobs.
    versions, positions, rows_of: [M] int64; for each token its policy, the number of tokens sampled before it in its
        rollout, and the index of its row.
    notes: omissions and their reasons.
    """

    rows: tuple[SampleRow, ...]
    engine: Tensor
    versions: np.ndarray
    positions: np.ndarray
    rows_of: np.ndarray
    num_groups: int
    num_rollouts: int
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.engine)

    def mask_of(self, rows: Sequence[SampleRow]) -> Tensor:
        """Returns [M] bool, True for the tokens of `rows`."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        for row in rows:
            mask[row.tokens] = True
        return mask


def read_sample(
    groups: Sequence[RolloutGroup],
    vocabulary: int,
    has_weights: Callable[[int], bool],
    max_tokens: int | None = None,
) -> Sample:
    """Returns the tokens that can be checked; if there are more than `max_tokens`, those of groups spread evenly.

    Raises:
        ParityError: no tokens, no logprobs, ids outside the vocabulary, or no policy with weights.
    """
    if not groups:
        raise ParityError("no rollout groups: expected at least one to check")
    chosen = evenly([_num_tokens(group) for group in groups], max_tokens)
    notes = [f"{len(chosen)} of {len(groups)} groups checked: max_tokens = {max_tokens}"] * (len(chosen) < len(groups))
    rows: list[SampleRow] = []
    left_out: Counter[str] = Counter()
    gone: set[int] = set()
    first = 0
    for g in chosen:
        _check_numbers(groups[g], vocabulary)
        for row in _rows(g, groups[g]):
            missing = {version for version in row.versions.tolist() if not has_weights(version)}
            gone |= missing - {UNKNOWN_VERSION}
            if reason := _reason_to_leave_out(row, missing):
                left_out[reason] += 1
                continue
            rows.append(replace(row, first=first))
            first += len(row.sampled)
    _check_rest([groups[g] for g in chosen], rows, gone)
    notes += [f"{count} rows left out: {reason}" for reason, count in left_out.items()]
    return _table(rows, notes)


def evenly(sizes: Sequence[int], budget: int | None) -> list[int]:
    """Returns indexes of parts, spread evenly, whose sizes sum to the budget at most; at least one index."""
    total = sum(sizes)
    if budget is None or total <= budget:
        return list(range(len(sizes)))
    chosen: list[int] = []
    passed = taken = 0
    for place, size in enumerate(sizes):
        passed += size
        if not chosen or taken + size <= passed * budget / total:
            chosen.append(place)
            taken += size
    return chosen


def evenly_and_worst(sizes: Sequence[int], gaps: Sequence[float], budget: int) -> tuple[list[int], list[int]]:
    """Returns indexes of parts spread evenly over half of the budget, and these with the parts of the largest gaps;
    their sizes sum to the budget at most, unless one part is larger."""
    fair = evenly(sizes, budget if sum(sizes) <= budget else budget // 2)
    chosen, taken = set(fair), sum(sizes[place] for place in fair)
    for place in sorted(range(len(sizes)), key=lambda place: -gaps[place]):
        if place not in chosen and taken + sizes[place] <= budget:
            chosen.add(place)
            taken += sizes[place]
    return fair, sorted(chosen)


def _num_tokens(group: RolloutGroup) -> int:
    return sum(rollout.num_sampled_tokens for rollout in group.rollouts)


def _rows(g: int, group: RolloutGroup) -> Iterator[SampleRow]:
    for sibling, rollout in enumerate(group.rollouts):
        before = 0
        for segment in rollout.segments:
            for part in _requests(segment):
                sampled = np.concatenate([np.arange(start, end) for start, end in part.loss_mask])
                versions = np.repeat(*np.array([(s.version, s.end - s.start) for s in part.version_spans]).T)
                yield SampleRow(g, sibling, part, group.sampling, sampled, versions, 0, before, group.images or {})
                before += len(sampled)


def _requests(segment: Segment) -> Iterator[Segment]:
    """Yields `segment` up to its last sampled token, or a segment for each turn if several policies sampled them."""
    if not segment.loss_mask:
        return
    runs = list(segment.loss_mask[:1])
    for start, end in segment.loss_mask[1:]:
        if start == runs[-1][1]:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    if len({span.version for span in segment.version_spans}) == 1:
        yield _part_of(segment, tuple(runs), 0, segment.num_sampled_tokens)
        return
    lengths = [end - start for start, end in runs]
    for run, (first, last) in zip(runs, pairwise(np.cumsum([0, *lengths]).tolist()), strict=True):
        yield _part_of(segment, (run,), first, last)


def _part_of(segment: Segment, runs: tuple[tuple[int, int], ...], first: int, last: int) -> Segment:
    """Returns the segment up to the end of `runs`, which hold its sampled tokens [first, last)."""
    start, end = runs[0][0], runs[-1][1]
    spans = [
        VersionSpan(span.version, max(start, span.start), min(end, span.end))
        for span in segment.version_spans
        if span.start < end and span.end > start
    ]
    return Segment(
        token_ids=segment.token_ids[: 4 * end],
        behavior_logprobs=segment.behavior_logprobs[4 * first : 4 * last],
        loss_mask=runs,
        version_spans=tuple(spans),
        finish_reason=segment.finish_reason,
        sampling_mask=None if segment.sampling_mask is None else segment.sampling_mask[first:last],
        routes=segment.routes.part(0, end - 1) if segment.routes else UNSET,
        images=tuple(image for image in segment.images or () if image.end <= end) or UNSET,
    )


def _reason_to_leave_out(row: SampleRow, missing: set[int]) -> str:
    if row.start == 0:
        return "no context before the first sampled token"
    if UNKNOWN_VERSION in missing:
        return f"sampled by an unknown policy (version {UNKNOWN_VERSION})"
    if missing:
        return f"weights of version {_listed(missing)} are gone; a larger weights.keep_versions keeps them"
    if row.segment.images and len(set(row.versions.tolist())) > 1:
        return "with images, and sampled by several policies"
    return ""


def _check_numbers(group: RolloutGroup, vocabulary: int) -> None:
    for rollout in group.rollouts:
        for segment in rollout.segments:
            largest = np.frombuffer(segment.token_ids, dtype=np.int32).max(initial=0)
            if largest >= vocabulary:
                raise ParityError(
                    f"group {group.index}: token id {largest}, but model.path has a vocabulary of {vocabulary}: "
                    "expected the model that the rollouts were sampled from"
                )
            if not np.isfinite(np.frombuffer(segment.behavior_logprobs, dtype=np.float32)).all():
                raise ParityError(
                    f"group {group.index}: behavior_logprobs holds a value that is not finite, expected the logprob of "
                    "each sampled token"
                )


def _check_rest(groups: Sequence[RolloutGroup], rows: Sequence[SampleRow], gone: set[int]) -> None:
    """Raises ParityError if there is nothing to compare."""
    if not any(_num_tokens(group) for group in groups):
        raise ParityError(f"{len(groups)} rollout groups without a sampled token: expected token ids and logprobs")
    if not rows and gone:
        raise ParityError(
            f"the weights of every policy that the rollouts name are gone: version {_listed(gone)}; expected at least "
            "one of them: check sooner, or keep more with a larger weights.keep_versions"
        )
    if not rows:
        raise ParityError(
            f"no row can be checked: each is of an unknown policy (version {UNKNOWN_VERSION}) or without context; "
            "expected version_spans that name the policy of each sampled token"
        )
    if not any(segment.behavior_logprobs.strip(b"\0") for segment in (row.segment for row in rows)):
        raise ParityError("every behavior_logprob is 0: expected the logprob of each sampled token from the engine")


def _table(rows: list[SampleRow], notes: list[str]) -> Sample:
    lengths = [len(row.sampled) for row in rows]
    packed = b"".join(row.segment.behavior_logprobs for row in rows)
    return Sample(
        rows=tuple(rows),
        engine=torch.from_numpy(np.frombuffer(packed, dtype=np.float32).astype(np.float64)),
        versions=np.concatenate([row.versions for row in rows]),
        positions=np.concatenate([np.arange(row.before, row.before + len(row.sampled)) for row in rows]),
        rows_of=np.repeat(np.arange(len(rows)), lengths),
        num_groups=len({row.group for row in rows}),
        num_rollouts=len({(row.group, row.sibling) for row in rows}),
        notes=tuple(notes),
    )


def _listed(versions: set[int]) -> str:
    ordered = sorted(versions)
    return ", ".join(map(str, ordered[:8])) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")
