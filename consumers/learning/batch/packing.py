"""Packs prompt groups into tensors: rows without padding, contexts that siblings share stored once."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from penstock.consumers.learning.advantages import batch_rewards, make_advantage
from penstock.consumers.learning.batch.batch import (
    UNKNOWN_EXPERT,
    Batch,
    MicroBatch,
    MiniBatch,
    Place,
    Support,
    TopTokens,
    idle_microbatch,
)
from penstock.consumers.learning.batch.images import PlacedImage, RowImages, row_images
from penstock.consumers.learning.batch.lag import KnownLags, Lags, known_lags, span_lags
from penstock.consumers.learning.batch.layout import MIN_BUCKET_TOKENS, Arrangement, make_layout
from penstock.consumers.learning.batch.sharing import ALONE, Sharing, minibatches_of, shared_out, spread
from penstock.consumers.learning.batch.split import split_tokens
from penstock.consumers.learning.batch.trainable import check_taught
from penstock.consumers.learning.outcome import outcome
from penstock.schemas.config import RunConfig
from penstock.schemas.images import ImagePlace
from penstock.schemas.policy import UNKNOWN_VERSION
from penstock.schemas.rollout import RecordError, Rollout, RolloutGroup, Segment, unpack_ids
from penstock.schemas.routes import UNKNOWN


@dataclass(frozen=True)
class _Row:
    """A segment on its way into a batch."""

    segment: Segment
    place: Place
    rollout: int
    """The place of its rollout among all of the batch."""
    spans: tuple["_Span", ...]
    """Tile the sampled tokens, in order."""
    temperature: float
    rollout_tokens: int
    advantage: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The images of its group by digest."""

    @property
    def prefix_length(self) -> int:
        """Context tokens before the first sampled one."""
        return self.segment.loss_mask[0][0]

    @property
    def prefix(self) -> tuple[int, bytes, bytes, tuple[ImagePlace, ...]]:
        """Group, bytes of the context, those of its routes, and its images: rows with an equal prefix share it."""
        routes = self.segment.routes.part(0, self.prefix_length).ids if self.segment.routes else b""
        images = tuple(image for image in self.segment.images or () if image.start < self.prefix_length)
        return self.place.group, self.segment.token_ids[: 4 * self.prefix_length], routes, images

    @property
    def length(self) -> int:
        """Tokens up to the one before the last sampled one."""
        return self.segment.loss_mask[-1][1] - 1

    @property
    def is_pure(self) -> bool:
        """See `MicroBatch.is_pure`."""
        return all(span.lag == 0 for span in self.spans) or (
            self.spans[0].older >= 0 and len({span.older for span in self.spans}) == 1
        )

    @property
    def num_unmasked(self) -> int:
        """Sampled tokens in the loss mask."""
        return sum(span.num_tokens for span in self.spans if span.is_trained)


class _Span(NamedTuple):
    """Consecutive sampled tokens of one version. is_trained: whether they are in the loss mask. older: the version, if
    their proximal logprobs are recomputed under it, else -1."""

    num_tokens: int
    lag: int
    is_trained: bool = True
    older: int = UNKNOWN_VERSION


def pack(
    groups: Sequence[RolloutGroup],
    lag_of: Lags,
    config: RunConfig,
    *,
    every_row: bool = False,
    sharing: Sharing = ALONE,
) -> Batch:
    """Packs the groups of one update; each must have passed `check_trainable`.

    They are split into one part per optimizer step (`minibatches_of`).

    Groups whose advantages are all 0, as without reward variance, are left out of the rows but counted in the
    denominators, which leaves the policy term unchanged and saves cost. One rollout of each is kept for the metrics
    (`MiniBatch.skipped`), a sibling that depends on the group's index.

    The loss mask is made here (`_rows`), and correction, loss and metrics read it from the micro-batches: tokens older
    than `RunConfig.oldest_lag` are masked, as are truncated rollouts with `advantage.truncated = "mask"`, which are not
    in the denominators either. A row without an unmasked token is left out, unless KL in the reward needs its tokens.

    With a teacher no group is left out; the advantages are those of the rewards, all 0 if the teacher is alone.

    Args:
        every_row: trains on groups without advantage too, for an objective whose loss is not 0 there.
        sharing: the ranks that share the rows; `Batch.of_rank` returns the part of each.
        lag_of: the lag of a policy version. If it raises UnknownVersionError the token has the lag of the row's oldest
            known version, or the lag bound without one, and at least 1.

    Raises:
        FutureVersionError: from `lag_of`.
        RecordError: a row without context, or without the logprobs of a teacher's server.
        ConfigError: an advantage function that does not fit the batch; see `make_advantage`.
    """
    lags, rewards = known_lags(lag_of), batch_rewards(groups, config.advantage)
    is_alone = config.teacher is not None and config.teacher.alone
    advantages = np.zeros(len(rewards.values)) if is_alone else make_advantage(config.advantage)(rewards)
    of_group, first = {}, 0
    for group, own in zip(groups, rewards.by_group(advantages), strict=False):
        of_group[group.index] = first, own.tolist()
        first += len(own)
    every_row = every_row or config.advantage.kl_coefficient > 0 or config.teacher is not None
    parts = [_rows_of(part, of_group, lags, config, every_row) for part in minibatches_of(groups, config)]
    rows = [row for part in parts for row in part.rows]
    histograms: dict[str, Counter[int]] = {name: Counter() for name in sorted({each.environment for each in groups})}
    of_index = {group.index: histograms[group.environment] for group in groups}
    for row in (*rows, *(row for part in parts for row in part.skipped)):
        for span in row.spans:
            of_index[row.place.group][span.lag] += span.num_tokens
    names = list(histograms)
    return Batch(
        minibatches=tuple(_pack_part(part, config, sharing) for part in parts),
        num_tokens_trained=_num_unmasked(rows),
        num_rows=sum(row.num_unmasked > 0 for row in rows),
        oldest_lag=config.oldest_lag,
        lag_histograms=histograms,
        environments=torch.tensor([names.index(group.environment) for group in groups for _ in group.rollouts]),
        outcome=outcome(groups),
        rewards=rewards,
        advantages=advantages,
    )


def pack_segments(
    segments: Sequence[tuple[int, Segment, float]],
    budget: int,
    *,
    arrangement: Arrangement = "packed",
    files: Mapping[str, bytes] | None = None,
) -> Iterator[tuple[MicroBatch, tuple[int, ...]]]:
    """Packs segments for forward passes without training: no advantage, no lag, nothing left out.

    Args:
        segments: the number of the group, the segment (at least one sampled token, and context before it), and the
            temperature of each. Segments of one group that begin with the same context share it.
        budget: tokens of one forward pass, as `trainer.tokens_per_microbatch`.
        arrangement: of the rows; see `PackedModel.arrangement`.
        files: the segments' images by digest.

    Yields:
        A micro-batch, and the places in `segments` of the segments in it, in the order of its tokens.
    """
    rows = [replace(_plain_row(number, *each), files=files or {}) for number, each in enumerate(segments)]
    for part in _split(rows, budget, arrangement):
        yield _pack_rows(part, arrangement), tuple(row.rollout for row in part)


def pack_demonstrations(segments: Sequence[Segment], budget: int, sharing: Sharing) -> MiniBatch:
    """Packs demonstrations for one step: no advantage, no lag, the tokens of their turns as denominator.

    budget: tokens of one forward pass. sharing: the ranks that share the rows; `MiniBatch.of_rank` returns the part of
    each.
    """
    rows = [_plain_row(number, number, segment, 1.0) for number, segment in enumerate(segments)]
    return MiniBatch(
        microbatches=_pack_passes(_passes(rows, budget, sharing), sharing),
        indexes=(),
        num_tokens=_num_unmasked(rows),
        num_rollouts=len(rows),
    )


def _plain_row(number: int, group: int, segment: Segment, temperature: float) -> _Row:
    return _Row(
        segment=segment,
        place=Place(group, number, 0),
        rollout=number,
        spans=(_Span(segment.num_sampled_tokens, 0),),
        temperature=temperature,
        rollout_tokens=segment.num_sampled_tokens,
    )


@dataclass(frozen=True)
class _Part:
    """The groups of a mini-batch, the rows that are trained on, and the other rows."""

    groups: Sequence[RolloutGroup]
    rows: list[_Row]
    skipped: list[_Row]


def _rows_of(
    groups: Sequence[RolloutGroup],
    advantages: Mapping[int, tuple[int, list[float]]],
    lags: KnownLags,
    config: RunConfig,
    every_row: bool,
) -> _Part:
    """Makes the rows of a mini-batch. advantages: by group index, the place of the first rollout and the advantages."""
    part = _Part(groups, [], [])
    for group in groups:
        first, own = advantages[group.index]
        rows = part.rows if every_row or any(own) else part.skipped
        rows += _rows(group, first, own, lags, config)
    return part


def _pack_part(part: _Part, config: RunConfig, sharing: Sharing) -> MiniBatch:
    budget = config.trainer.tokens_per_microbatch
    of_kl = config.advantage.kl_coefficient > 0  # the KL of a whole rollout
    alive, skipped = ([row for row in rows if of_kl or row.num_unmasked] for rows in (part.rows, part.skipped))
    sample = _sample_rollouts(skipped)
    rollouts = [one for group in part.groups for one in group.rollouts if not _is_left_out(one, config)]
    split = _passes(alive, budget, sharing)
    whole = MiniBatch(
        microbatches=_pack_passes(split, sharing),
        places=tuple(tuple(row.place for row in rows) for rows in split if rows),
        indexes=tuple(group.index for group in part.groups),
        num_tokens=max(1, sum(rollout.num_sampled_tokens for rollout in rollouts)),
        num_rollouts=max(1, len(rollouts)),
        skipped=_pack_passes(_passes(sample, budget, sharing), sharing),
        skipped_scale=_num_unmasked(skipped) / _num_unmasked(sample) if sample else 1.0,
    )

    def alone(*, by_rollout: bool = False) -> Iterator[MiniBatch]:
        for index, rows in groupby(alive, key=lambda row: row.rollout if by_rollout else row.place.group):
            yield replace(
                whole,
                microbatches=_pack_passes(_passes(list(rows), budget, sharing), sharing),
                places=(),
                indexes=(index,),
                skipped=(),
            )

    return replace(whole, alone=alone)


def _pack_passes(passes: list[list[_Row]], sharing: Sharing) -> tuple[MicroBatch, ...]:
    found, size = [_pack_rows(rows, sharing.arrangement) for rows in passes], sharing.per_pass
    if size > 1:
        found = [each for n in range(0, len(found), size) for each in split_tokens(found[n : n + size])]
    return tuple(found)


def _num_unmasked(rows: list[_Row]) -> int:
    return sum(row.num_unmasked for row in rows)


def _is_left_out(rollout: Rollout, config: RunConfig) -> bool:
    """True for a rollout that neither the loss nor its denominators read: a truncated one, if the run says so."""
    return config.advantage.truncated == "mask" and rollout.is_truncated


def _sample_rollouts(rows: list[_Row]) -> list[_Row]:
    """Samples a rollout of each group by the group's index alone: siblings are exchangeable, so it has no bias."""
    found: list[_Row] = []
    for index, of_group in groupby(rows, key=lambda row: row.place.group):
        own = list(of_group)
        rollouts = sorted({row.place.rollout for row in own})
        found += [row for row in own if row.place.rollout == rollouts[index % len(rollouts)]]
    return found


def _rows(
    group: RolloutGroup, first: int, advantages: list[float], lag: KnownLags, config: RunConfig
) -> Iterator[_Row]:
    for r, (rollout, advantage) in enumerate(zip(group.rollouts, advantages, strict=True)):
        rollout_tokens, is_left_out = rollout.num_sampled_tokens, _is_left_out(rollout, config)
        for s, segment in enumerate(rollout.segments):
            if not segment.loss_mask:
                continue
            if segment.loss_mask[0][0] < 1:
                raise RecordError(f"group {group.index}: loss_mask starts at token 0; see check_trainable")
            if config.teacher_url is not None:
                check_taught(group, segment)
            yield _Row(
                segment=segment,
                place=Place(group.index, r, s),
                rollout=first + r,
                spans=tuple(_spans(segment, lag, config, is_left_out=is_left_out)),
                temperature=group.sampling.temperature,
                rollout_tokens=rollout_tokens,
                advantage=advantage,
                files=group.images or {},
            )


def _spans(segment: Segment, lag: KnownLags, config: RunConfig, *, is_left_out: bool) -> Iterator[_Span]:
    recomputes = config.correction.proximal == "sampled_version"
    for d, span in zip(span_lags(segment, lag, config.lag_bound), segment.version_spans, strict=True):
        is_trained = not is_left_out and d <= config.oldest_lag
        is_older = recomputes and is_trained and d > 0 and lag(span.version) is not None
        yield _Span(span.end - span.start, d, is_trained, span.version if is_older else UNKNOWN_VERSION)


def _split(rows: list[_Row], budget: int, arrangement: Arrangement) -> Iterator[list[_Row]]:
    """Splits rows into parts of at most `budget` tokens, each with its longest row first; a longer row is a part of its
    own.

    A shared context counts for every row: it is packed once, but attention holds it once per row. Parts are consecutive
    rows, so that siblings are together; in rectangles rows of similar length are, and padding counts.
    """
    part: list[_Row] = []
    used = 0
    in_rectangles = arrangement == "rectangles"
    if in_rectangles:
        rows = _longest_first(rows)
    for row in rows:
        size = part[0].length if in_rectangles and part else row.length
        if part and used + size > budget:
            yield _longest_first(part)
            part, used, size = [], 0, row.length
        part.append(row)
        used += size
    if part:
        yield _longest_first(part)


def _passes(rows: list[_Row], budget: int, sharing: Sharing) -> list[list[_Row]]:
    """Returns the rows of each forward pass; with several ranks each one's first pass, then each one's second, etc.

    Every rank has the same number of passes of about equal cost; a rank with too few rows gets empty ones. Ranks that
    compute their tokens together have one pass of `budget` tokens for each of them, and share its rows.
    """
    if sharing.num_ranks == 1:
        return list(_split(rows, budget, sharing.arrangement))
    size = sharing.per_pass
    shares = shared_out(_by_group(rows), lambda row: sharing.cost(row.length), sharing.num_ranks // size)
    splits = [list(_split(share, budget * size, sharing.arrangement)) for share in shares]
    num_passes = max(map(len, splits))
    if sharing.arrangement == "rectangles":
        spread_out = [[*split, *([] for _ in range(num_passes - len(split)))] for split in splits]
    else:
        spread_out = [spread(share, lambda row: row.length, num_passes) for share in shares]
    return [
        _longest_first(own)
        for number in range(num_passes)
        for share in spread_out
        for own in (shared_out(_by_group(share[number]), lambda row: row.length, size) if size > 1 else [share[number]])
    ]


def _by_group(rows: list[_Row]) -> list[list[_Row]]:
    return [list(of_group) for _, of_group in groupby(rows, key=lambda row: row.place.group)]


def _longest_first(rows: list[_Row]) -> list[_Row]:
    """Sorts the rows so that attention's rectangles have little padding."""
    return sorted(rows, key=lambda row: -row.length)


def _pack_rows(rows: list[_Row], arrangement: Arrangement) -> MicroBatch:
    """Packs the rows of one forward pass, and again those of each older policy under which tokens are recomputed."""
    older = sorted({span.older for row in rows for span in row.spans} - {UNKNOWN_VERSION})
    of_version = {version: [row for row in rows if version in {span.older for span in row.spans}] for version in older}
    of_older = {version: _packed(some, arrangement) for version, some in of_version.items()}
    return replace(_packed(rows, arrangement), older=of_older)


def _packed(rows: list[_Row], arrangement: Arrangement) -> MicroBatch:
    if not rows:
        return idle_microbatch()
    token_ids = np.frombuffer(b"".join(row.segment.token_ids for row in rows), dtype=np.int32)
    sizes = np.array([row.segment.num_tokens for row in rows])
    offsets = np.cumsum(sizes) - sizes
    lengths = np.array([row.length for row in rows])
    prefix_lengths = np.array([row.prefix_length if arrangement == "packed" else 0 for row in rows])

    prefix_ids: dict[tuple[int, bytes, bytes, tuple[ImagePlace, ...]], int] = {}
    prefix_of = np.array([prefix_ids.setdefault(row.prefix, len(prefix_ids)) for row in rows])
    first_with = np.unique(prefix_of, return_index=True)[1]
    unique_lengths = prefix_lengths[first_with]
    prefix_starts = (np.cumsum(unique_lengths) - unique_lengths)[prefix_of]
    own_lengths = lengths - prefix_lengths
    own_starts = unique_lengths.sum() + np.cumsum(own_lengths) - own_lengths

    positions = np.concatenate(
        [_ranges(np.zeros_like(unique_lengths), unique_lengths), _ranges(prefix_lengths, own_lengths)]
    )
    at_least = math.inf if arrangement == "rectangles" else MIN_BUCKET_TOKENS
    bases = np.concatenate([offsets[first_with].repeat(unique_lengths), offsets.repeat(own_lengths)])

    runs = [(r, start, end - start) for r, row in enumerate(rows) for start, end in row.segment.loss_mask]
    run_rows, run_starts, run_lengths = np.array(runs).T
    sampled_at = _ranges(run_starts, run_lengths)
    row_ids = run_rows.repeat(run_lengths)
    before = sampled_at - 1
    own = before - prefix_lengths[row_ids]
    span_tokens, span_lag, is_trained, span_older = np.array([span for row in rows for span in row.spans]).T
    per_row = np.array([(row.advantage, row.temperature, row.rollout_tokens) for row in rows], dtype=np.float32)
    advantages, temperature, rollout_tokens = np.ascontiguousarray(per_row[row_ids].T)
    behavior = np.frombuffer(b"".join(row.segment.behavior_logprobs for row in rows), dtype=np.float32)
    packed_ids = torch.from_numpy(token_ids[bases + positions].astype(np.int64))
    layout = make_layout(prefix_starts, prefix_lengths, own_starts, lengths, len(positions), at_least)
    return MicroBatch(
        token_ids=packed_ids,
        position_ids=torch.from_numpy(positions),
        layout=layout,
        predicting=torch.from_numpy(np.where(own < 0, prefix_starts[row_ids] + before, own_starts[row_ids] + own)),
        targets=torch.from_numpy(token_ids[offsets[row_ids] + sampled_at].astype(np.int64)),
        behavior_logprobs=torch.from_numpy(behavior.copy()),
        advantages=torch.from_numpy(advantages),
        temperature=torch.from_numpy(temperature),
        rollout_tokens=torch.from_numpy(rollout_tokens),
        lag=torch.from_numpy(span_lag.repeat(span_tokens)),
        loss_mask=torch.from_numpy(is_trained.astype(bool).repeat(span_tokens)),
        row_ids=torch.from_numpy(row_ids),
        versions=torch.from_numpy(span_older.repeat(span_tokens)),
        is_pure=torch.tensor([row.is_pure for row in rows])[row_ids],
        rollouts=torch.tensor([row.rollout for row in rows]),
        support=_support([row.segment for row in rows]),
        top=_top([row.segment for row in rows]),
        teacher_logprobs=_teacher_logprobs([row.segment for row in rows]),
        routes=_routes([row.segment for row in rows], bases + positions),
        images=row_images(dict(_placed_images(rows, prefix_starts, prefix_lengths, own_starts)), packed_ids, layout),
    )


def _placed_images(
    rows: list[_Row], prefix_starts: np.ndarray, prefix_lengths: np.ndarray, own_starts: np.ndarray
) -> Iterator[tuple[int, PlacedImage]]:
    """Yields the images of rows, those of a shared prefix with each of its rows, by the packed index of their first
    token."""
    places = (each.tolist() for each in (prefix_starts, prefix_lengths, own_starts))
    for row, prefix_start, prefix_length, own_start in zip(rows, *places, strict=True):
        for image in row.segment.images or ():
            first = image.start + (prefix_start if image.start < prefix_length else own_start - prefix_length)
            if image.end <= row.length:
                yield first, PlacedImage(image.digest, row.files[image.digest], image.end - image.start)


def segment_images(segment: Segment, files: Mapping[str, bytes]) -> RowImages | None:
    """Returns the images of one segment alone, all of whose tokens are computed. files: by digest."""
    length = np.array([segment.num_tokens])
    images = {i.start: PlacedImage(i.digest, files[i.digest], i.end - i.start) for i in segment.images or ()}
    token_ids = torch.tensor(list(unpack_ids(segment.token_ids)))
    return row_images(images, token_ids, make_layout(0 * length, 0 * length, 0 * length, length, len(token_ids)))


def _teacher_logprobs(segments: list[Segment]) -> torch.Tensor | None:
    found = [segment.teacher_logprobs for segment in segments if segment.teacher_logprobs]
    if len(found) < len(segments):
        return None
    return torch.from_numpy(np.frombuffer(b"".join(found), dtype=np.float32).copy())


def _routes(segments: list[Segment], tokens: np.ndarray) -> torch.Tensor | None:
    """Returns the routes of some of the segments' tokens, by their places in the concatenated segments."""
    found = [segment_routes(segment) for segment in segments]
    known = [routes for routes in found if routes is not None]
    return torch.from_numpy(np.concatenate(known)[tokens]) if len(known) == len(found) else None


def segment_routes(segment: Segment) -> np.ndarray | None:
    """Returns the experts of a segment's tokens, [num_tokens, layers, experts per token] int16; None without any."""
    routes = segment.routes
    if not routes:
        return None
    ids = np.frombuffer(routes.ids, dtype=f"<{routes.kind}").reshape(-1, routes.num_layers, routes.per_token)
    found = ids.astype(np.int16)
    found[ids == UNKNOWN[routes.kind]] = UNKNOWN_EXPERT
    return np.pad(found, ((0, 1), (0, 0), (0, 0)), constant_values=UNKNOWN_EXPERT)


def _support(segments: list[Segment]) -> Support | None:
    if all(segment.sampling_mask is None for segment in segments):
        return None
    entries = [
        entry for segment in segments for entry in (segment.sampling_mask or (b"",) * segment.num_sampled_tokens)
    ]
    kept = np.frombuffer(b"".join(entries), dtype=np.int32).astype(np.int64)
    return Support(torch.from_numpy(kept), torch.tensor([len(entry) // 4 for entry in entries]))


def _top(segments: list[Segment]) -> TopTokens | None:
    found = [segment.top_logprobs for segment in segments if segment.top_logprobs]
    if len(found) < len(segments) or len({each.count for each in found}) > 1:
        return None
    ids = np.frombuffer(b"".join(each.ids for each in found), dtype=np.int32).reshape(-1, found[0].count)
    logprobs = np.frombuffer(b"".join(each.logprobs for each in found), dtype=np.float32).reshape(ids.shape)
    return TopTokens(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logprobs.copy()))


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates the ranges `starts[i] .. starts[i] + lengths[i] - 1`."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + (starts - ends + lengths).repeat(lengths)
