"""Hypotheses on a policy's adapter: the engine samples without it, or with it at another scale."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.consumers.parity.replay import Replay, as_labelled
from penstock.consumers.parity.sample import evenly
from penstock.consumers.parity.verdict import Candidate, gap_of
from penstock.schemas.config import LoraConfig

MAX_TOKENS = 2048
"""The most sampled tokens that are tried."""
_NUM_STEPS = 4
"""Gauss-Newton steps of the fit."""
_STEP = 0.05
_SAME = 0.02
"""Scales that differ by this share of the right one are equal."""


class AdapterHypotheses:
    """Recomputes some tokens of a sample with other shares of the adapter.

    baseline: [M] float64, as the trainer computes it.
    """

    def __init__(self, replay: Replay, baseline: Tensor, lora: LoraConfig) -> None:
        self._replay, self._lora, sample = replay, lora, replay.sample
        self._rows = [sample.rows[n] for n in evenly([len(row.sampled) for row in sample.rows], MAX_TOKENS)]
        self._engine = sample.engine
        self._tried = {1.0: torch.where(sample.mask_of(self._rows), baseline, torch.nan)}

    def candidates(self) -> Iterator[Candidate]:
        yield Candidate("adapter-off", self._at(0.0))
        share = self._fitted()
        found = f"{share * self._lora.scaling:.3g} where lora.alpha / lora.rank is {self._lora.scaling:.3g}"
        is_another = abs(share) > _SAME and abs(share - 1) > _SAME
        yield Candidate("adapter-scale", self._at(share), possible=is_another, note=found, detail=found)

    def _fitted(self) -> float:
        """Returns the share that fits best, by least squares from the best share of the usual mistakes."""
        alpha, rank, scaling = self._lora.alpha, self._lora.rank, self._lora.scaling
        usual = (1.0, alpha, alpha / math.sqrt(rank), 1 / rank, scaling**2)
        share = min({1.0, *(scale / scaling for scale in usual)}, key=self._gap)
        for _ in range(_NUM_STEPS):
            now = self._at(share)
            slope = (self._at(share * (1 + _STEP)) - now) / (share * _STEP)
            known = ~(slope.isnan() | self._engine.isnan())
            left, slope = (self._engine - now)[known], slope[known]
            if not float(slope.square().sum()) > 0:
                break
            nearer = share + float((left * slope).sum() / slope.square().sum())
            if not math.isfinite(nearer) or nearer == 0 or self._gap(nearer) >= self._gap(share):
                break
            share = nearer
        return share

    def _gap(self, share: float) -> float:
        return gap_of(self._engine, self._at(share)).mean

    def _at(self, share: float) -> Tensor:
        """Returns [M] float64 logprobs with this share of the adapter, NaN for tokens that are not tried."""
        if share not in self._tried:
            with self._replay.policies.adapter_share(share):
                self._tried[share] = self._replay.logprobs(as_labelled(row) for row in self._rows)
        return self._tried[share]
