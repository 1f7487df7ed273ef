import pytest

from penstock.schemas.policy import Chunk, Piece, TensorSpec, WeightManifest
from penstock.schemas.weights.log import VersionGoneError, WeightLog


def manifest(version: int, delta_of: int | None, num_bytes: int) -> WeightManifest:
    return WeightManifest(
        version=version,
        parent_version=version - 1,
        total_bytes=100,
        tensors=(TensorSpec(name="w", dtype="float32", shape=(25,)),),
        delta_of=delta_of,
        chunks=(Chunk(key=f"{version}", num_bytes=num_bytes, digest="", num_changed=1, pieces=(Piece(0, 0, 25, ""),)),),
    )


def log_of(*announced: WeightManifest, anchors: tuple[WeightManifest, ...] = ()) -> WeightLog:
    return WeightLog({each.version: each for each in announced}, {each.version: each for each in anchors})


CHAIN = (manifest(0, None, 100), *(manifest(n, n - 1, 10) for n in range(1, 9)))


def versions(way: list[WeightManifest]) -> list[tuple[int, int | None]]:
    return [(each.version, each.delta_of) for each in way]


def test_a_reader_that_holds_a_version_applies_what_follows() -> None:
    assert versions(log_of(*CHAIN).way(3, held=1)) == [(2, 1), (3, 2)]
    assert log_of(*CHAIN).way(3, held=3) == []


def test_a_reader_that_holds_nothing_begins_with_the_newest_anchor() -> None:
    log = log_of(*CHAIN, anchors=(CHAIN[0], manifest(6, None, 90)))
    assert versions(log.way(8)) == [(6, None), (7, 6), (8, 7)]


def test_an_anchor_is_taken_where_it_is_less_to_read_than_the_chain() -> None:
    heavy = (manifest(0, None, 100), *(manifest(n, n - 1, 60) for n in range(1, 5)))
    log = log_of(*heavy, anchors=(manifest(3, None, 80),))
    assert versions(log.way(4, held=2)) == [(3, 2), (4, 3)]
    assert versions(log.way(4, held=1)) == [(3, None), (4, 3)]


def test_a_whole_policy_ends_the_chain() -> None:
    fork = manifest(10**9, None, 100)
    log = log_of(*CHAIN, fork, manifest(10**9 + 1, 10**9, 10), anchors=(fork,))
    assert versions(log.way(10**9 + 1, held=8)) == [(10**9, None), (10**9 + 1, 10**9)]


def test_a_version_ahead_of_the_one_wanted_is_no_way_to_it() -> None:
    assert versions(log_of(*CHAIN).way(2, held=5)) == [(0, None), (1, 0), (2, 1)]


@pytest.mark.parametrize("held", [None, 1, 77])
def test_a_chain_that_was_cut_says_which_policy_is_gone(held: int | None) -> None:
    with pytest.raises(VersionGoneError, match="policy 5: its weights are kept no longer"):
        log_of(*CHAIN[3:]).way(5, held)
    with pytest.raises(VersionGoneError, match="policy 99"):
        log_of(*CHAIN).way(99, held)


@pytest.mark.parametrize("of", [5, 6])
def test_a_manifest_that_is_a_delta_of_itself_or_of_what_follows_is_no_way(of: int) -> None:
    with pytest.raises(VersionGoneError):
        log_of(manifest(5, of, 0), manifest(6, 5, 0)).way(6, held=1)
