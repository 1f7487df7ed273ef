"""The images of a micro-batch's rows, on the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.consumers.learning.batch.layout import PackedLayout


class PlacedImage(NamedTuple):
    """An image file, its digest, and the number of tokens that stand for it in a row."""

    digest: str
    file: bytes
    num_tokens: int


@dataclass(frozen=True)
class RowImages:
    """The images of rows of N packed tokens; a prefix that rows share has its images once.

    files: by digest. digests: [P], of each place in the order of the packed tokens.
    places: [N] int64, the place that a token is in, -1 for none.
    token_ids: [N] int64. buckets, slots: those of the layout.
    """

    files: dict[str, bytes]
    digests: tuple[str, ...]
    places: Tensor
    token_ids: Tensor
    buckets: tuple[Tensor, ...]
    slots: Tensor

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "RowImages":
        """Returns the same: images are read on the host."""
        return self

    def places_in(self, bucket: Tensor) -> Tensor:
        """Returns the place of each token of a rectangle of packed indices, -1 past a row's end too."""
        found = self.places[bucket]
        found[:, 1:].masked_fill_(bucket[:, 1:] == bucket[:, :1], -1)
        return found

    def order(self, rows: Tensor) -> list[str]:
        """Returns the digests of the images of rows, one row after another. rows: `places_in`."""
        return [self.digests[place] for row in rows.tolist() for place, _ in groupby(row) if place >= 0]


class Sees(Protocol):
    """A model that images can be shown.

    token: the id that stands for a feature of an image. settings: see `penstock.schemas.images.processor_settings`.
    """

    token: int

    @property
    def settings(self) -> Mapping[str, Any]: ...

    def num_tokens(self, digest: str, file: bytes) -> int:
        """Returns the features of an image.

        Raises:
            ImageError: it cannot be decoded.
        """
        ...


def row_images(images: Mapping[int, PlacedImage], token_ids: Tensor, layout: PackedLayout) -> RowImages | None:
    """Returns the images of packed rows; None without any. images: by the packed index of their first token."""
    if not images:
        return None
    places = np.full(len(token_ids), -1, dtype=np.int64)
    in_order = sorted(images)
    for number, first in enumerate(in_order):
        places[first : first + images[first].num_tokens] = number
    return RowImages(
        files={image.digest: image.file for image in images.values()},
        digests=tuple(images[first].digest for first in in_order),
        places=torch.from_numpy(places),
        token_ids=token_ids,
        buckets=layout.buckets,
        slots=layout.slots,
    )
