"""The published parts of a model, as references to the masters."""

from typing import NamedTuple

import torch
from torch import Tensor


class PublishedPart(NamedTuple):
    """This rank's part of a published tensor.

    dtype: the type of the published elements. shape: the whole tensor's. start: the number of its elements, in
        row-major order, before those in `values`.
    values: contiguous; the optimizer writes to it, and its type may differ from `dtype`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    values: Tensor
