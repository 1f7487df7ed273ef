"""The content of a chunk: the elements of some pieces that an update changed, in the published type, bit for bit.

Changed elements are overwritten, never added to or XORed: applied twice, a chunk changes nothing more. A piece is
stored dense, all of its elements, or sparse, the positions and values of the changed ones, whichever is smaller.

A chunk is msgpack, `[[tensor, start, count, positions or nil, values], ...]`, compressed by zstd. Unchanged pieces are
left out. `values` are the elements' bytes in planes, the lowest byte of each first: this groups exponents, which are
similar. `positions` are the numbers of unchanged elements before each changed one, in bytes: 255 means 255 unchanged
elements, a smaller number that many and the changed element after them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
import zstandard

from penstock.schemas.policy import Chunk, Piece
from penstock.schemas.weights.layout import Array, Layout, LayoutError

LEVEL = 1
"""zstd's level: higher ones are many times slower, and the low bytes of weights are noise."""
_SKIP = 255


class ChunkError(ValueError):
    """A chunk that does not match its manifest, or changes elements that do not exist."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The changed elements of one piece. positions: None if all `count` are in `values`. Both are views of the chunk
    that they were decoded from."""

    tensor: int
    start: int
    count: int
    positions: memoryview | None
    values: memoryview


class Slice(NamedTuple):
    """Elements of a tensor from `start`, [count] as unsigned integers. old: None if nothing is compared."""

    tensor: int
    start: int
    old: Array | None
    new: Array


_decoder = msgspec.msgpack.Decoder(list[Part])


def digest(data: Any) -> str:
    """Returns the XXH3-128 digest, hexadecimal. data: bytes or a contiguous array."""
    return xxhash.xxh3_128_hexdigest(data)


def dense(tensor: int, start: int, new: Array) -> Part:
    """Encodes all elements of a piece; `new` as unsigned integers."""
    return Part(tensor, start, len(new), None, _planes(new))


def changed(tensor: int, start: int, old: Array, new: Array) -> tuple[Part | None, int]:
    """Encodes the changes from `old` to `new`, both [count] as unsigned integers; returns them with the number of
    elements that differ, or None if none does."""
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return None, 0
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // _SKIP
    num_codes = len(positions) + int(skips.sum())
    if num_codes + len(positions) * new.dtype.itemsize >= new.nbytes:
        return dense(tensor, start, new), len(positions)
    codes = np.full(num_codes, _SKIP, np.uint8)
    codes[np.cumsum(skips + 1) - 1] = gaps - skips * _SKIP
    return Part(tensor, start, len(new), codes.data, _planes(new[positions])), len(positions)


def pack(parts: Sequence[Part]) -> bytes:
    return zstandard.ZstdCompressor(LEVEL).compress(msgspec.msgpack.encode(parts))


def encode_chunk(key: str, slices: Sequence[Slice], *, whole: bool) -> tuple[Chunk, bytes]:
    """Encodes these pieces as a chunk, with all of their elements if `whole`; returns its entry in the manifest and its
    bytes. If nothing is compared, all elements count as changed."""
    parts, pieces, num_changed = [], [], 0
    for tensor, start, old, new in slices:
        part: Part | None
        if whole or old is None:
            part, count = dense(tensor, start, new), len(new) if old is None else int(np.count_nonzero(old != new))
        else:
            part, count = changed(tensor, start, old, new)
        parts += [part] if part is not None else []
        pieces.append(Piece(tensor, start, len(new), digest(new)))
        num_changed += count
    data = pack(parts)
    chunk = Chunk(key=key, num_bytes=len(data), digest=digest(data), num_changed=num_changed, pieces=tuple(pieces))
    return chunk, data


def unpack(data: bytes) -> list[Part]:
    """Decodes a chunk. Raises ChunkError if it is invalid."""
    try:
        return _decoder.decode(zstandard.ZstdDecompressor().decompress(data))
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ChunkError(f"no chunk: {error}") from None


def apply(parts: Sequence[Part], layout: Layout, file: Any) -> None:
    """Overwrites the changed elements in `file`, the bytes of a policy in this layout.

    Raises:
        ChunkError: a part does not fit the policy; those before it are applied.
    """
    for part in parts:
        try:
            target = layout.elements(file, part.tensor, part.start, part.count)
        except LayoutError as error:
            raise ChunkError(str(error)) from None
        where: Any = slice(None) if part.positions is None else _positions(part)
        num_values = part.count if part.positions is None else len(where)
        if len(part.values) != num_values * target.dtype.itemsize:
            raise ChunkError(
                f"{layout.tensors[part.tensor].name}: {len(part.values)} bytes for {num_values} elements of "
                f"{target.dtype.itemsize} bytes"
            )
        target[where] = _elements(part.values, target.dtype)


def _positions(part: Part) -> Array:
    codes = np.frombuffer(part.positions if part.positions is not None else b"", np.uint8)
    is_element = codes != _SKIP
    positions: Array = np.cumsum(codes + is_element.astype(np.int64))[is_element] - 1
    if len(positions) and positions[-1] >= part.count:
        raise ChunkError(f"tensor {part.tensor}: position {positions[-1]} of a piece of {part.count} elements")
    return positions


def _planes(elements: Array) -> memoryview:
    return elements.view(np.uint8).reshape(-1, elements.dtype.itemsize).T.copy().reshape(-1).data


def _elements(values: memoryview, bits: np.dtype[Any]) -> Array:
    planes = np.frombuffer(values, np.uint8).reshape(bits.itemsize, -1)
    elements: Array = np.ascontiguousarray(planes.T).reshape(-1).view(bits)
    return elements
