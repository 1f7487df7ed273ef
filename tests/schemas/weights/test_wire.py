"""The weight log's format: payloads written once, which every release must read as they were meant."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.schemas.policy import Chunk, Piece, TensorSpec, WeightManifest
from penstock.schemas.weights.codec import Slice, apply, digest, encode_chunk, unpack
from penstock.schemas.weights.layout import Layout
from penstock.schemas.weights.log import decode_manifest

WIRE = Path(__file__).parents[2] / "golden/wire"
TENSORS = (
    TensorSpec(name="embed.weight", dtype="bfloat16", shape=(40, 30)),
    TensorSpec(name="norm.weight", dtype="float32", shape=(6,)),
    TensorSpec(name="head.weight", dtype="float16", shape=(3, 5)),
)
NAMES = ("weights_v1_whole", "weights_v1_delta")
PIECES = ((0, 0, 700), (0, 700, 500), (1, 0, 6), (2, 0, 15))
"""(tensor, start, count): the first tensor is in two."""


def policies() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The elements as unsigned integers. Of the second policy 5 of the first tensor's differ, the second's not at all,
    and the third's all."""
    before = [
        (np.arange(1200) * 257 % 65536).astype(np.uint16),
        (np.arange(6) + 0x3F800000).astype(np.uint32),
        (np.arange(15) * 1001).astype(np.uint16),
    ]
    after = [tensor.copy() for tensor in before]
    after[0][[3, 4, 300, 699, 1199]] ^= 1
    after[2] ^= 0x8000
    return before, after


def manifest(version: int) -> WeightManifest:
    data = (WIRE / f"{NAMES[version]}.chunk").read_bytes()
    pieces = tuple(
        Piece(tensor, start, count, digest(policies()[version][tensor][start : start + count]))
        for tensor, start, count in PIECES
    )
    return WeightManifest(
        version=version,
        parent_version=version - 1,
        total_bytes=2 * 1200 + 4 * 6 + 2 * 15,
        tensors=TENSORS,
        delta_of=0 if version else None,
        chunks=(
            Chunk(
                key=("0-whole-0-0", "1-delta-0-0")[version],
                num_bytes=len(data),
                digest=digest(data),
                num_changed=(1221, 20)[version],
                pieces=pieces,
            ),
        ),
        store="redis",
        created_s=1700000000.5,
    )


@pytest.mark.parametrize("version", [0, 1])
def test_manifests_read_and_write_as_they_did(version: int) -> None:
    data = (WIRE / f"{NAMES[version]}.json").read_bytes()
    assert decode_manifest(data, "it") == manifest(version)
    of_run = msgspec.structs.replace(manifest(version), run_id="0123456789ab")
    data = (WIRE / f"{NAMES[version]}_of_run.json").read_bytes()
    assert decode_manifest(data, "it") == of_run
    assert msgspec.json.encode(of_run) == data


def test_chunks_give_the_bits_that_they_were_made_of_and_are_encoded_as_they_were() -> None:
    layout, before = Layout(TENSORS), None
    file = bytearray(layout.num_bytes)
    for name, policy in zip(NAMES, policies(), strict=True):
        parts = unpack((WIRE / f"{name}.chunk").read_bytes())
        apply(parts, layout, file)
        for number, tensor in enumerate(TENSORS):
            held = layout.elements(file, number, 0, math.prod(tensor.shape))
            assert held.tobytes() == policy[number].tobytes(), (name, tensor.name)
        slices = []
        for tensor, start, count in PIECES:
            old = None if before is None else before[tensor][start:][:count]
            slices.append(Slice(tensor, start, old, policy[tensor][start:][:count]))
        _, data = encode_chunk("key", slices, whole=before is None)
        assert unpack(data) == parts
        before = policy
