"""What is published of a model, as references to the masters."""

from typing import NamedTuple

import torch
from torch import Tensor


class PublishedPart(NamedTuple):
    """What this rank holds of a published tensor.

    dtype: of the published elements. shape: of the whole tensor. start: the number of its elements, in row-major order,
        before those in `values`.
    values: contiguous; the optimizer writes to it, and it may be of another type than `dtype`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    values: Tensor
