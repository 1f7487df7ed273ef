"""Hypotheses on the images of rows: the engine has them in another order, at other positions, or resized otherwise."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from penstock.consumers.learning.model.vision import Vision
from penstock.consumers.parity.replay import Replay, as_labelled
from penstock.consumers.parity.sample import SampleRow, evenly
from penstock.consumers.parity.verdict import Candidate, gap_of

MAX_TOKENS = 2048
"""The most sampled tokens that are tried."""
RESAMPLING = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
"""Pillow's filters."""


class ImageHypotheses:
    """Recomputes some rows with images otherwise. baseline: [M] float64, as the trainer computes it."""

    def __init__(self, replay: Replay, baseline: Tensor, vision: Vision) -> None:
        self._replay, self._baseline, self._vision = replay, baseline, vision
        seeing = [row for row in replay.sample.rows if row.segment.images]
        self._rows = [seeing[n] for n in evenly([len(row.sampled) for row in seeing], MAX_TOKENS)] if seeing else []

    def candidates(self) -> Iterator[Candidate]:
        if not self._rows:
            return
        turned = [_turned(row) for row in self._rows]
        moved = [other for row, other in zip(self._rows, turned, strict=True) if other.segment != row.segment]
        yield Candidate("image-order", self._of(turned), possible=bool(moved), detail=f"{len(moved)} rows have several")
        if self._vision.has_positions:
            with self._vision.otherwise(plain_positions=True):
                yield Candidate("image-positions", self._of(self._rows))
        found = {}
        for name, number in RESAMPLING.items():
            with self._vision.otherwise(resample=number):
                found[name] = self._of(self._rows)
        best = min(found, key=lambda name: gap_of(self._replay.sample.engine, found[name]).mean)
        yield Candidate("image-size", found[best], note=best, detail=f"by Pillow's filter {best}")

    def _of(self, rows: list[SampleRow]) -> Tensor:
        """Returns [M] float64, NaN for tokens of other rows."""
        found = self._replay.logprobs(as_labelled(row) for row in rows)
        return torch.where(self._replay.sample.mask_of(self._rows), found, torch.nan)


def _turned(row: SampleRow) -> SampleRow:
    """Returns the row with its images in the reverse order, if they have equally many tokens."""
    places = row.segment.images or ()
    digests = [place.digest for place in reversed(places)]
    turned = tuple(msgspec.structs.replace(place, digest=digest) for place, digest in zip(places, digests, strict=True))
    sizes = {place.digest: place.end - place.start for place in places}
    fits = all(sizes[place.digest] == place.end - place.start for place in turned)
    return replace(row, segment=msgspec.structs.replace(row.segment, images=turned)) if fits else row
