import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.policy import Piece, TensorSpec
from penstock.schemas.weights.codec import ChunkError, Part, apply, changed, dense, pack, unpack
from penstock.schemas.weights.layout import Layout, LayoutError

BITS = {"bfloat16": np.uint16, "float32": np.uint32, "int64": np.uint64, "bool": np.uint8}


def layout_of(dtype: str, *counts: int) -> Layout:
    return Layout([TensorSpec(name=f"t{n}", dtype=dtype, shape=(count,)) for n, count in enumerate(counts)])


def empty_file(layout: Layout) -> bytearray:
    file = bytearray(layout.num_bytes)
    file[: len(layout.header)] = layout.header
    return file


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(sorted(BITS)),
    count=st.integers(1, 3000),
    density=st.sampled_from([0.0, 0.0005, 0.004, 0.02, 0.1, 0.3, 0.7, 1.0]),
    start=st.integers(0, 5),
)
def test_a_change_is_exact_and_idempotent(seed: int, dtype: str, count: int, density: float, start: int) -> None:
    draw = np.random.default_rng(seed)
    layout = layout_of(dtype, start + count + 2)
    file = empty_file(layout)
    whole = layout.elements(file, 0, 0, start + count + 2)
    whole[:] = draw.integers(0, np.iinfo(whole.dtype).max, len(whole), dtype=whole.dtype, endpoint=True)
    before = whole.copy()
    new = before[start : start + count].copy()
    hit = draw.random(count) < density
    new[hit] = draw.integers(0, np.iinfo(new.dtype).max, int(hit.sum()), dtype=new.dtype, endpoint=True)

    part, num_changed = changed(0, start, before[start : start + count], new)

    assert num_changed == int((new != before[start : start + count]).sum())
    after = before.copy()
    after[start : start + count] = new
    parts = [] if part is None else [part]
    assert (part is None) == (num_changed == 0)
    for _ in range(2):
        apply(unpack(pack(parts)), layout, file)
        assert whole.tobytes() == after.tobytes()


def test_one_changed_element_in_a_hundred_takes_a_fraction_of_the_dense_bytes() -> None:
    draw = np.random.default_rng(0)
    old = (draw.standard_normal(1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    hit = draw.random(len(new)) < 0.012
    new[hit] += 1
    part, num_changed = changed(0, 0, old, new)
    assert num_changed == int(hit.sum())
    assert len(pack([part])) < 0.03 * new.nbytes


def test_a_change_of_most_elements_is_stored_dense_and_bits_are_compared_instead_of_values() -> None:
    old = np.zeros(100, np.uint16)
    part, num_changed = changed(0, 0, old, old + 1)
    assert part is not None and part.positions is None and num_changed == 100
    zeros, others = (np.array([zero, np.nan, 1.0], np.float32).view(np.uint32) for zero in (0.0, -0.0))
    assert changed(0, 0, zeros, others)[1] == 1


def test_what_is_no_chunk_or_does_not_fit_is_refused_by_name() -> None:
    layout = layout_of("bfloat16", 4)
    for part, message in (
        (Part(0, 0, 4, None, memoryview(b"1234")), "t0: 4 bytes for 4 elements of 2 bytes"),
        (Part(0, 0, 4, memoryview(bytes([9])), memoryview(b"12")), "position 9 of a piece of 4 elements"),
        (Part(0, 2, 4, None, memoryview(b"12345678")), "elements 2 to 6 of tensor 0"),
        (Part(7, 0, 4, None, memoryview(b"12345678")), "tensor 7"),
    ):
        with pytest.raises(ChunkError, match=message):
            apply([part], layout, empty_file(layout))
    for data in (b"", b"no zstd", pack([])[:-1], pack([dense(0, 0, np.zeros(9, np.uint8))])[:-3]):
        with pytest.raises(ChunkError, match="no chunk"):
            unpack(data)
    with pytest.raises(LayoutError, match=r"w: dtype 'float8_e4m3fn', expected one of float64"):
        Layout([TensorSpec(name="w", dtype="float8_e4m3fn", shape=(1,))])


def test_the_layout_is_a_file_that_safetensors_reads() -> None:
    from safetensors.numpy import load

    layout = Layout(
        [
            TensorSpec(name="a", dtype="float32", shape=(2, 3)),
            TensorSpec(name="b", dtype="int64", shape=()),
            TensorSpec(name="c", dtype="bool", shape=(5,)),
        ]
    )
    file = empty_file(layout)
    layout.elements(file, 0, 0, 6).view(np.float32)[:] = np.arange(6)
    layout.elements(file, 1, 0, 1)[:] = 7
    layout.elements(file, 2, 3, 2)[:] = 1
    found = load(bytes(file))
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["b"] == 7
    assert found["c"].tolist() == [False, False, False, True, True]


def test_pieces_tile_the_policy_or_they_do_not() -> None:
    layout = layout_of("bfloat16", 4, 0, 3)
    pieces = [Piece(2, 0, 3, ""), Piece(0, 0, 1, ""), Piece(0, 1, 3, "")]
    assert layout.is_tiled_by(pieces)
    assert not layout.is_tiled_by(pieces[:-1])
    assert not layout.is_tiled_by([*pieces, Piece(0, 3, 1, "")])
    assert not layout.is_tiled_by([*pieces[1:], Piece(2, 0, 4, "")])
    assert not layout.is_tiled_by([*pieces, Piece(3, 0, 0, "")])
