"""A batch as the learner takes it: mini-batches of one optimizer step, micro-batches of one forward pass."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.advantages import BatchRewards
from penstock.consumers.learning.batch.images import RowImages
from penstock.consumers.learning.batch.layout import PackedLayout, TokenShare, make_layout
from penstock.schemas.metrics import LAG_LABELS, lag_label

UNKNOWN_EXPERT = -1
"""In a micro-batch's routes: the trainer's router chooses."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: N packed tokens, of which M sampled ones are scored.

    A row is one segment up to the token before its last sampled one; later tokens predict nothing.

    token_ids, position_ids: [N] int64; positions restart with each row.
    layout: which packed tokens make up each row.
    predicting: [M] int64, the packed token whose hidden state predicts the sampled token `targets` [M] int64.
    behavior_logprobs, advantages, temperature, rollout_tokens: [M] float32 (see `LossInputs`).
    lag: [M] int64 optimizer steps.
    loss_mask: [M] bool, the tokens that are trained on: not too old, and not of a rollout that is left out
        because it is truncated. The correction may mask more of them.
    row_ids: [M] int64, ascending.
    versions: [M] int64, the older policy under which a token's proximal logprob is recomputed, -1 for none.
    is_pure: [M] bool, True in rows that one policy sampled: of lag 0 throughout, or of one version in `versions`.
    rollouts: [rows] int64, the place of each row's rollout among all of the batch.
    support: the tokens that the sampler chose from; None if it excluded none (top-k, top-p).
    top: the likeliest ids where each was sampled; None if some row has none.
    teacher_logprobs: [M] float32, from a teacher's server; None without one.
    routes: [N, layers, experts per token] int16, the experts that the engine chose, `UNKNOWN_EXPERT` where it is not
        known; None if some row has none.
    images: those of the rows; None without any.
    older: by version in `versions`, the rows with its tokens, in the same order; its values stay on the host.
    share: if several ranks compute their micro-batches' tokens together, the tokens that this one computes.
    """

    token_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    predicting: Tensor
    targets: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    temperature: Tensor
    rollout_tokens: Tensor
    lag: Tensor
    loss_mask: Tensor
    row_ids: Tensor
    versions: Tensor
    is_pure: Tensor
    rollouts: Tensor
    support: "Support | None" = None
    top: "TopTokens | None" = None
    teacher_logprobs: Tensor | None = None
    routes: Tensor | None = None
    images: RowImages | None = None
    older: Mapping[int, "MicroBatch"] = field(default_factory=dict)
    share: TokenShare | None = None

    @property
    def is_idle(self) -> bool:
        """True without sampled tokens: the pass of a rank that has no rows left while others have."""
        return not len(self.targets)

    def with_advantages(self, advantages: Tensor) -> "MicroBatch":
        """Replaces the advantages. advantages: [R] float32, of each rollout of the batch."""
        return replace(self, advantages=advantages[self.rollouts[self.row_ids]])

    def to(self, device: torch.device) -> "MicroBatch":
        if device.type == "cpu":
            return self
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "older"}
        # A copy from memory that is not pinned has left it when the call returns.
        moved = {name: part.to(device, non_blocking=True) for name, part in parts.items() if part is not None}
        return replace(self, **moved)


def idle_microbatch() -> MicroBatch:
    """Returns one token that is not scored: every rank must take part in every forward and backward pass."""
    start, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    no_ids, no_values = torch.empty(0, dtype=torch.int64), torch.empty(0)
    return MicroBatch(
        token_ids=torch.zeros(1, dtype=torch.int64),
        position_ids=torch.zeros(1, dtype=torch.int64),
        layout=make_layout(start, one, start, one, 1),
        predicting=no_ids,
        targets=no_ids,
        behavior_logprobs=no_values,
        advantages=no_values,
        temperature=no_values,
        rollout_tokens=no_values,
        lag=no_ids,
        loss_mask=torch.empty(0, dtype=torch.bool),
        row_ids=no_ids,
        versions=no_ids,
        is_pure=torch.empty(0, dtype=torch.bool),
        rollouts=no_ids,
    )


@dataclass(frozen=True)
class TopTokens:
    """The K likeliest ids where each of M tokens was sampled: ids [M, K] int64, behavior_logprobs [M, K] float32."""

    ids: Tensor
    behavior_logprobs: Tensor

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "TopTokens":
        return TopTokens(*(part.to(device, non_blocking=non_blocking) for part in (self.ids, self.behavior_logprobs)))


@dataclass(frozen=True)
class Support:
    """The ids that the sampler kept for each of M sampled tokens.

    kept: [K] int64, concatenated over the tokens. counts: [M] int64, the number of each token's ids; 0 means the whole
    vocabulary.
    """

    kept: Tensor
    counts: Tensor

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Support":
        return Support(*(part.to(device, non_blocking=non_blocking) for part in (self.kept, self.counts)))

    def mask(self, tokens: slice, vocabulary: slice) -> Tensor:
        """Returns [n, v] bool for a tile of tokens by vocabulary: True where the id could be sampled."""
        start, stop, _ = tokens.indices(len(self.counts))
        counts = self.counts[tokens]
        kept = self.kept[self._bounds[start] : self._bounds[stop]] - vocabulary.start
        width = vocabulary.stop - vocabulary.start
        mask = (counts == 0)[:, None].repeat(1, width + 1)
        # Ids outside the tile go to an extra column: selecting those inside would make the host wait for a GPU.
        mask[_rows(counts, kept), torch.where((kept >= 0) & (kept < width), kept, width)] = True
        return mask[:, :width]

    def holds(self, targets: Tensor) -> Tensor:
        """Returns [M] bool: True where the token of `targets` [M] could be sampled."""
        rows = _rows(self.counts, self.kept)
        hits = torch.zeros_like(self.counts).index_add_(0, rows, (self.kept == targets[rows]).long())
        return (self.counts == 0) | (hits > 0)

    @cached_property
    def _bounds(self) -> list[int]:
        """[M + 1]: the bounds of each token's ids in `kept`."""
        return [0, *self.counts.cumsum(0).tolist()]


def _rows(counts: Tensor, kept: Tensor) -> Tensor:
    """Returns the token that each kept id belongs to."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=len(kept))


class Place(NamedTuple):
    """A segment's task index, the number of its rollout in the group, and its own in the rollout."""

    group: int
    rollout: int
    segment: int


def _no_groups(*, by_rollout: bool = False) -> Iterator["MiniBatch"]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The groups of one optimizer step: forward passes, and the denominators of the loss.

    With several ranks `microbatches` and `skipped` alternate between them, the same number for each.
    """

    microbatches: tuple[MicroBatch, ...]
    places: tuple[tuple[Place, ...], ...] = ()
    """The segments of each micro-batch's rows, in the order of their sampled tokens; idle ones have no entry."""
    indexes: tuple[int, ...]
    """The released task indexes in it."""
    num_tokens: int
    """Sampled tokens of every group, including those masked for lag and skipped ones: the token-level denominator.
    This and `num_rollouts` leave out rollouts that are masked because they are truncated, and are at least 1."""
    num_rollouts: int
    """Rollouts of every group: the rollout-level denominator."""
    skipped: tuple[MicroBatch, ...] = ()
    """For the metrics, one rollout of each group that is not trained on: scored without gradient."""
    skipped_scale: float = 1.0
    """Unmasked tokens of all rollouts of those groups, per token in `skipped`."""
    alone: Callable[..., Iterator["MiniBatch"]] = field(default=_no_groups, compare=False)
    """Yields each group that is trained on as its own mini-batch, with this one's denominators; on the lead only. With
    `by_rollout` each rollout, whose place among all of the batch is in `indexes`."""

    def with_advantages(self, advantages: Tensor) -> "MiniBatch":
        """Replaces the advantages. advantages: [R] float32, of each rollout of the batch."""
        return replace(
            self,
            microbatches=tuple(each.with_advantages(advantages) for each in self.microbatches),
            alone=lambda **by: (each.with_advantages(advantages) for each in self.alone(**by)),
        )

    def of_rank(self, rank: int, num_ranks: int) -> "MiniBatch":
        """Returns a rank's part, without `places`, and without `alone` unless it is the lead's."""
        own = slice(rank, None, num_ranks)
        return MiniBatch(
            microbatches=self.microbatches[own],
            indexes=self.indexes,
            num_tokens=self.num_tokens,
            num_rollouts=self.num_rollouts,
            skipped=self.skipped[own],
            skipped_scale=self.skipped_scale,
            alone=self.alone if rank == 0 else _no_groups,
        )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One update's worth of groups. Token counts are of sampled tokens."""

    minibatches: tuple[MiniBatch, ...]
    num_tokens_trained: int
    """Unmasked tokens of the rows that are trained on."""
    num_rows: int
    oldest_lag: int
    """Tokens of a larger lag are masked."""
    lag_histograms: dict[str, Counter[int]]
    """By environment, the tokens of every group by lag, masked ones included."""
    environments: Tensor
    """[R] int64, the place of each rollout's environment in `lag_histograms`."""
    outcome: dict[str, float]
    """`outcome.outcome` of every group."""
    rewards: BatchRewards
    """Of every rollout."""
    advantages: np.ndarray
    """[R] float64, of every rollout."""

    @property
    def indexes(self) -> tuple[int, ...]:
        """The released task indexes, in the order of the mini-batches."""
        return tuple(index for minibatch in self.minibatches for index in minibatch.indexes)

    @property
    def group_advantages(self) -> dict[int, tuple[float, ...]]:
        """The advantages of each group's siblings, by its index."""
        indexes, advantages = (self.rewards.by_group(each) for each in (self.rewards.indexes, self.advantages))
        return {int(index[0]): tuple(own.tolist()) for index, own in zip(indexes, advantages, strict=True) if len(own)}

    @property
    def lag_histogram(self) -> dict[int, int]:
        """Tokens of every group by lag, masked ones included, ascending."""
        return dict(sorted(sum(self.lag_histograms.values(), Counter[int]()).items()))

    @property
    def padding(self) -> float:
        """The share of padding in the rectangles of its rows."""
        layouts = [each.layout for minibatch in self.minibatches for each in minibatch.microbatches]
        cells = sum(bucket.numel() for layout in layouts for bucket in layout.buckets)
        return sum(layout.num_padding for layout in layouts) / max(1, cells)

    @property
    def masked_by_lag(self) -> Tensor:
        """[E, 6] int64: tokens of every group beyond `oldest_lag`, by environment and place in `LAG_LABELS`."""
        masked = torch.zeros(len(self.lag_histograms), len(LAG_LABELS), dtype=torch.int64)
        for place, histogram in enumerate(self.lag_histograms.values()):
            for lag, num_tokens in histogram.items():
                if lag > self.oldest_lag:
                    masked[place, LAG_LABELS.index(lag_label(lag))] += num_tokens
        return masked

    @property
    def num_tokens_masked_lag(self) -> int:
        """Tokens of every group that are masked for their lag."""
        return int(self.masked_by_lag.sum())

    def with_advantages(self, advantages: np.ndarray) -> "Batch":
        """Replaces the advantages. advantages: [R] float64."""
        values = torch.from_numpy(advantages.astype(np.float32))
        parts = tuple(minibatch.with_advantages(values) for minibatch in self.minibatches)
        return replace(self, minibatches=parts, advantages=advantages)

    def of_rank(self, rank: int, num_ranks: int) -> "Batch":
        """Returns a rank's part."""
        parts = tuple(minibatch.of_rank(rank, num_ranks) for minibatch in self.minibatches)
        return replace(self, minibatches=parts)

    @property
    def microbatches(self) -> tuple[MicroBatch, ...]:
        """The forward passes of one epoch, in order."""
        return tuple(microbatch for minibatch in self.minibatches for microbatch in minibatch.microbatches)
