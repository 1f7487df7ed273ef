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


def versions(chain: list[WeightManifest]) -> list[tuple[int, int | None]]:
    return [(each.version, each.delta_of) for each in chain]


def test_the_chain_to_a_version_has_the_fewest_bytes() -> None:
    log = log_of(*CHAIN, anchors=(CHAIN[0], manifest(6, None, 90)))
    assert versions(log.chain(3, held=1)) == [(2, 1), (3, 2)]
    assert log.chain(3, held=3) == []
    assert versions(log.chain(8)) == [(6, None), (7, 6), (8, 7)], "the newest anchor"
    assert versions(log.chain(2, held=5)) == [(0, None), (1, 0), (2, 1)], "nothing leads back"

    heavy = (manifest(0, None, 100), *(manifest(n, n - 1, 60) for n in range(1, 5)))
    log = log_of(*heavy, anchors=(manifest(3, None, 80),))
    assert versions(log.chain(4, held=2)) == [(3, 2), (4, 3)]
    assert versions(log.chain(4, held=1)) == [(3, None), (4, 3)], "the anchor is less to read"

    fork = manifest(10**9, None, 100)
    log = log_of(*CHAIN, fork, manifest(10**9 + 1, 10**9, 10), anchors=(fork,))
    assert versions(log.chain(10**9 + 1, held=8)) == [(10**9, None), (10**9 + 1, 10**9)], "a whole policy ends it"


def test_a_log_without_a_manifest_leads_past_it_or_nowhere() -> None:
    anchor = manifest(3, None, 90)
    log = log_of(*CHAIN, anchors=(anchor,)).without(CHAIN[3])
    assert versions(log.chain(4, held=2)) == [(3, None), (4, 3)]
    with pytest.raises(VersionGoneError):
        log.without(anchor).chain(4, held=2)


def test_a_chain_that_was_cut_or_leads_in_a_circle_says_which_policy_is_gone() -> None:
    for held in (None, 1, 77):
        for log, wanted in [(log_of(*CHAIN[3:]), 5), (log_of(*CHAIN), 99)]:
            with pytest.raises(VersionGoneError, match=f"policy {wanted}: its weights are kept no longer"):
                log.chain(wanted, held)
        for of in (5, 6):
            with pytest.raises(VersionGoneError):
                log_of(manifest(5, of, 0), manifest(6, 5, 0)).chain(6, held)
