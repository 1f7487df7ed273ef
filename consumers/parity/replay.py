"""Logprobs as the trainer computes them, under any assignment of weights to the tokens of a row."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from penstock.consumers.learning.batch import Support
from penstock.consumers.learning.model import PackedModel
from penstock.consumers.learning.packing import pack_segments
from penstock.consumers.learning.scoring import head_logprobs
from penstock.consumers.parity.kept_keys import KeptKeys
from penstock.consumers.parity.policies import PolicyStore
from penstock.consumers.parity.sample import Sample, SampleRow
from torch import Tensor

Span = tuple[int, int, int]
"""Version, start, end: tokens `start:end` of the row go into the model with the weights of `version`. What is computed
at a token's place predicts the one after it, and its keys and values stay for all that follow."""


@dataclass(frozen=True)
class ReplayPlan:
    """Which weights see which token of a row.

    spans: tile the row's tokens up to the last but one.
    wanted: [m] bool, the sampled tokens whose logprobs count; None is all.
    """

    row: SampleRow
    spans: tuple[Span, ...]
    wanted: np.ndarray | None = None


@dataclass(frozen=True)
class Pass:
    """What one forward pass says about M sampled tokens; satisfies `penstock.consumers.learning.scoring.SampledTokens`.

    hidden: [N, H]. head: [V, H]. tokens: [M] int64 on CPU, places in the sample. wanted: [M] bool on CPU.
    predicting, targets: [M] int64. temperature: [M] float32.
    """

    hidden: Tensor
    head: Tensor
    tokens: Tensor
    wanted: Tensor
    predicting: Tensor
    targets: Tensor
    temperature: Tensor
    support: Support | None


def as_labelled(row: SampleRow, versions: np.ndarray | None = None) -> ReplayPlan:
    """The row as an engine in keep mode serves it: a token's keys and values are computed in the step that samples the
    next one, those of the context in the step that samples the first.

    Args:
        versions: [m], in place of the row's own.
    """
    versions = row.versions if versions is None else versions
    changes = np.flatnonzero(versions[1:] != versions[:-1]) + 1
    bounds = [0, *(row.sampled[changes] - 1).tolist(), int(row.sampled[-1])]
    firsts = [0, *changes.tolist()]
    spans = tuple((int(versions[n]), start, end) for n, (start, end) in zip(firsts, pairwise(bounds), strict=True))
    return ReplayPlan(row, spans)


class Replay:
    """Runs plans. `budget`: tokens of one forward pass."""

    def __init__(self, sample: Sample, policies: PolicyStore, budget: int, device: torch.device) -> None:
        self._sample, self._policies, self._budget, self._device = sample, policies, budget, device

    @torch.no_grad()
    def logprobs(self, plans: Iterable[ReplayPlan]) -> Tensor:
        """[M] float64 on CPU by the trainer's own code: the logprobs of the wanted tokens, NaN elsewhere."""
        found = torch.full((self._sample.num_tokens,), torch.nan, dtype=torch.float64)
        for each in self.passes(plans):
            logprobs, _ = head_logprobs(each.hidden, each.head, each)
            found[each.tokens[each.wanted]] = logprobs.double().cpu()[each.wanted]
        return found

    @torch.no_grad()
    def passes(self, plans: Iterable[ReplayPlan]) -> Iterator[Pass]:
        """One policy after the other, as far as the rows' own order allows."""
        plans = list(plans)
        whole = [plan for plan in plans if len(plan.spans) == 1]
        for version in sorted({plan.spans[0][0] for plan in whole}):
            yield from self._whole([plan for plan in whole if plan.spans[0][0] == version], version)
        mixed = sorted(
            (plan for plan in plans if len(plan.spans) > 1),
            key=lambda plan: (plan.spans[0][0], plan.spans[-1][0], plan.spans[-1][2]),
        )
        for batch in _within(mixed, self._budget):
            yield from self._continued(batch)

    def _whole(self, plans: list[ReplayPlan], version: int) -> Iterator[Pass]:
        model = self._policies.model(version)
        segments = [(plan.row.group, plan.row.segment, plan.row.sampling.temperature) for plan in plans]
        for microbatch, places in pack_segments(segments, self._budget):
            microbatch = microbatch.to(self._device)
            hidden, head = model.forward(microbatch)
            some = [plans[place] for place in places]
            yield Pass(
                hidden=hidden,
                head=head,
                tokens=torch.cat([torch.arange(plan.row.tokens.start, plan.row.tokens.stop) for plan in some]),
                wanted=torch.cat([torch.from_numpy(_wanted(plan)) for plan in some]),
                predicting=microbatch.predicting,
                targets=microbatch.targets,
                temperature=microbatch.temperature,
                support=microbatch.support,
            )

    def _continued(self, plans: list[ReplayPlan]) -> Iterator[Pass]:
        """Span after span with the keys and values of the spans before."""
        kept = KeptKeys(len(plans), max(plan.spans[-1][2] for plan in plans))
        done = [0] * len(plans)
        while any(done[p] < len(plan.spans) for p, plan in enumerate(plans)):
            version = min(plan.spans[done[p]][0] for p, plan in enumerate(plans) if done[p] < len(plan.spans))
            now = [p for p, plan in enumerate(plans) if done[p] < len(plan.spans) and plan.spans[done[p]][0] == version]
            found = self._span(plans, [(p, *plans[p].spans[done[p]][1:]) for p in now], version, kept)
            for p in now:
                done[p] += 1
            if found is not None:
                yield found

    def _span(self, plans: list[ReplayPlan], parts: list[Span], version: int, kept: KeptKeys) -> Pass | None:
        """Parts are (place of the plan, start, end)."""
        model: PackedModel = self._policies.model(version)
        rows = np.concatenate([np.full(end - start, p) for p, start, end in parts])
        positions = np.concatenate([np.arange(start, end) for _, start, end in parts])
        ids = np.concatenate([plans[p].row.token_ids[start:end] for p, start, end in parts])
        kept.begin(*(torch.from_numpy(each).to(self._device) for each in (rows, positions)))
        hidden, head = model.run(
            torch.from_numpy(ids).to(self._device), torch.from_numpy(positions).to(self._device), kept
        )
        before = np.cumsum([0] + [end - start for _, start, end in parts])
        scored = [_scored(plans[p], start, end, int(at)) for (p, start, end), at in zip(parts, before, strict=False)]
        if not any(len(each.tokens) for each in scored):
            return None
        segments = [plans[p].row.segment for p, _, _ in parts]
        support = _support([(part.sampling_mask, each.offsets) for part, each in zip(segments, scored, strict=True)])
        return Pass(
            hidden=hidden,
            head=head,
            tokens=torch.from_numpy(np.concatenate([each.tokens for each in scored])),
            wanted=torch.from_numpy(np.concatenate([each.wanted for each in scored])),
            predicting=torch.from_numpy(np.concatenate([each.predicting for each in scored])).to(self._device),
            targets=torch.from_numpy(np.concatenate([each.targets for each in scored])).to(self._device),
            temperature=torch.cat(
                [
                    torch.full((len(each.tokens),), plans[p].row.sampling.temperature)
                    for each, (p, _, _) in zip(scored, parts, strict=True)
                ]
            ).to(self._device),
            support=None if support is None else support.to(self._device),
        )


@dataclass(frozen=True)
class _Scored:
    """Sampled tokens that one span predicts; offsets count the row's sampled tokens."""

    offsets: np.ndarray
    tokens: np.ndarray
    wanted: np.ndarray
    predicting: np.ndarray
    targets: np.ndarray


def _scored(plan: ReplayPlan, start: int, end: int, at: int) -> _Scored:
    """at: the place of token `start` in the forward pass."""
    row = plan.row
    before = row.sampled - 1
    offsets = np.flatnonzero((before >= start) & (before < end))
    return _Scored(
        offsets=offsets,
        tokens=row.first + offsets,
        wanted=_wanted(plan)[offsets],
        predicting=at + before[offsets] - start,
        targets=row.token_ids[row.sampled[offsets]],
    )


def _wanted(plan: ReplayPlan) -> np.ndarray:
    return np.ones(len(plan.row.sampled), dtype=bool) if plan.wanted is None else plan.wanted


def _support(masks: Sequence[tuple[tuple[bytes, ...] | None, np.ndarray]]) -> Support | None:
    if all(mask is None for mask, _ in masks):
        return None
    entries = [b"" if mask is None else mask[offset] for mask, offsets in masks for offset in offsets.tolist()]
    kept = np.frombuffer(b"".join(entries), dtype=np.int32).astype(np.int64)
    return Support(torch.from_numpy(kept), torch.tensor([len(entry) // 4 for entry in entries]))


def _within(plans: Sequence[ReplayPlan], budget: int) -> Iterator[list[ReplayPlan]]:
    part: list[ReplayPlan] = []
    for plan in plans:
        # Kept keys stand in a rectangle: every row takes as much as the longest.
        longest = max(other.spans[-1][2] for other in (*part, plan))
        if part and longest * (len(part) + 1) > budget:
            yield part
            part = []
        part.append(plan)
    if part:
        yield part
