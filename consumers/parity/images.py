"""Hypotheses on the images of rows: the engine has them in another order, at other positions, resized otherwise, or
with other values."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from penstock.consumers.learning.model.vision import Vision
from penstock.consumers.parity.replay import Replay, as_labelled
from penstock.consumers.parity.sample import SampleRow, evenly
from penstock.consumers.parity.verdict import Candidate, gap_of

MAX_TOKENS = 2048
"""The most sampled tokens that are tried."""
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's, by their numbers."""
RESIZED: dict[str, dict[str, Any]] = {
    f"resized by Pillow's filter {name}": {"resample": number} for number, name in enumerate(FILTERS)
}
PIXELS: dict[str, dict[str, Any]] = {
    "mean and standard deviation 0.5": {"image_mean": IMAGENET_STANDARD_MEAN, "image_std": IMAGENET_STANDARD_STD},
    "ImageNet's mean and standard deviation": {"image_mean": IMAGENET_DEFAULT_MEAN, "image_std": IMAGENET_DEFAULT_STD},
    "CLIP's mean and standard deviation": {"image_mean": OPENAI_CLIP_MEAN, "image_std": OPENAI_CLIP_STD},
    "no mean and standard deviation": {"do_normalize": False},
    "values from 0 to 255": {"do_rescale": False},
    "cut to the square in the middle": {"cropped": True},
}
"""Mistakes in pixel values, as arguments of `Vision.otherwise`."""


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
        yield self._best("image-size", RESIZED)
        yield self._best("image-pixels", PIXELS)

    def _best(self, cause: str, mistakes: Mapping[str, dict[str, Any]]) -> Candidate:
        """Returns the candidate of the mistake that fits best, of those that leave images their number of tokens."""
        found = {}
        for name, settings in mistakes.items():
            with self._vision.otherwise(**settings):
                if all(self._has_its_size(row) for row in self._rows):
                    found[name] = self._of(self._rows)
        best = min(found, key=lambda name: gap_of(self._replay.sample.engine, found[name]).mean)
        return Candidate(cause, found[best], note=best, detail=best)

    def _has_its_size(self, row: SampleRow) -> bool:
        ids = row.token_ids
        return all(
            self._vision.num_tokens(place.digest, row.files[place.digest])
            == int((ids[place.start : place.end] == self._vision.token).sum())
            for place in row.segment.images or ()
        )

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
