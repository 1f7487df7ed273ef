"""The layout of a policy's tensors: a safetensors file that can be written in place."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.schemas.policy import Piece, TensorSpec

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""safetensors' names of types, by torch's names."""
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Array = np.ndarray[Any, np.dtype[Any]]


class LayoutError(ValueError):
    """A type of tensors that is not supported, or a piece that does not exist."""


def element_bytes(tensor: TensorSpec) -> int:
    """Returns the bytes of one element. Raises LayoutError for an unknown type."""
    name = SAFETENSORS_NAMES.get(tensor.dtype)
    if name is None:
        raise LayoutError(f"{tensor.name}: dtype {tensor.dtype!r}, expected one of {', '.join(SAFETENSORS_NAMES)}")
    return _BYTES[name]


def as_bits(data: Array) -> Array:
    """Views elements as unsigned integers of their size: equal bits are equal values."""
    return data.view(_UNSIGNED[data.dtype.itemsize])


def tensor_bytes(tensors: Iterable[TensorSpec]) -> int:
    """Returns the bytes of all elements. Raises LayoutError for an unknown type."""
    return sum(math.prod(tensor.shape) * element_bytes(tensor) for tensor in tensors)


class Layout:
    """A safetensors file with these tensors, in this order, without gaps.

    header: its bytes before the first tensor. num_bytes: the file's size; tensor_bytes: without the header.

    Raises:
        LayoutError: an unknown type.
    """

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.tensors = tuple(tensors)
        self.counts = [math.prod(tensor.shape) for tensor in tensors]
        self._bits = [_UNSIGNED[element_bytes(tensor)] for tensor in tensors]
        places: dict[str, Any] = {}
        end = 0
        self._starts: list[int] = []
        for tensor, count in zip(tensors, self.counts, strict=True):
            self._starts.append(end)
            end += count * element_bytes(tensor)
            places[tensor.name] = {
                "dtype": SAFETENSORS_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [self._starts[-1], end],
            }
        text = json.dumps(places, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64 + 56)  # tensors begin at a multiple of 64, behind the length in 8 bytes
        self.header = len(text).to_bytes(8, "little") + text
        self.tensor_bytes = end
        self.num_bytes = len(self.header) + end

    def elements(self, file: Any, tensor: int, start: int, count: int) -> Array:
        """Returns a view of `count` elements of a tensor from `start`, as unsigned integers. file: the whole file's
        bytes.

        Raises:
            LayoutError: these elements do not exist.
        """
        if not (0 <= tensor < len(self.tensors) and 0 <= start <= start + count <= self.counts[tensor]):
            raise LayoutError(f"elements {start} to {start + count} of tensor {tensor}: the policy has none there")
        bits = self._bits[tensor]
        offset = len(self.header) + self._starts[tensor] + start * np.dtype(bits).itemsize
        view: Array = np.frombuffer(file, bits, count, offset)
        return view

    def piece(self, file: Any, piece: Piece) -> Array:
        return self.elements(file, piece.tensor, piece.start, piece.count)

    def is_tiled_by(self, pieces: Sequence[Piece]) -> bool:
        """Returns whether the pieces cover all elements of all tensors, each once."""
        reached = [0] * len(self.tensors)
        for piece in sorted(pieces, key=lambda piece: (piece.tensor, piece.start)):
            if not 0 <= piece.tensor < len(reached) or piece.start != reached[piece.tensor] or piece.count < 0:
                return False
            reached[piece.tensor] += piece.count
        return reached == self.counts
