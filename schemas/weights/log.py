"""The weight log for readers: manifests by version, and the steps from one version to another.

The policy stream holds an entry `<version>-1` for each policy, most of them deltas of the one before. Anchors, whole
policies, are in a separate hash; an epoch's first policy is an anchor, and a policy may be both. A reader that holds a
version of the chain applies the deltas after it; any other reader begins with an anchor.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.schemas.keys import Field, Keys
from penstock.schemas.policy import WeightManifest

_decoder = msgspec.json.Decoder(WeightManifest)


class ManifestError(ValueError):
    """An entry of the log that is not a manifest."""


class VersionGoneError(LookupError):
    """A version whose weights the log no longer holds."""


class WeightLog(NamedTuple):
    """The manifests by version. announced: those on the policy stream. anchors: whole policies. unreadable: the
    problems of entries that are not manifests."""

    announced: Mapping[int, WeightManifest]
    anchors: Mapping[int, WeightManifest]
    unreadable: tuple[str, ...] = ()

    def chain(self, version: int, held: int | None = None) -> list[WeightManifest]:
        """Returns the manifests to apply, in order, to get the weights of `version`: onto those of `held` or, if the
        first manifest is a whole policy, onto nothing. It chooses the fewest bytes; empty if `version` is `held`.

        Raises:
            VersionGoneError: the log does not lead to `version`.
        """
        steps: list[WeightManifest] = []
        num_bytes, best_bytes = 0, float("inf")
        best: list[WeightManifest] | None = None
        reached: int | None = version
        while reached is not None and num_bytes < best_bytes:
            if reached == held:
                best = steps
                break
            delta = self.announced.get(reached)
            for whole in (self.anchors.get(reached), delta):
                if whole is not None and whole.delta_of is None and num_bytes + whole.chunk_bytes < best_bytes:
                    best, best_bytes = [*steps, whole], num_bytes + whole.chunk_bytes
            if delta is None or delta.delta_of is None or delta.delta_of >= reached:
                break
            steps = [*steps, delta]
            num_bytes += delta.chunk_bytes
            reached = delta.delta_of
        if best is None:
            raise VersionGoneError(f"policy {version}: its weights are kept no longer")
        return best[::-1]

    def without(self, manifest: WeightManifest) -> "WeightLog":
        """Returns the log without this manifest; others of its version stay."""
        announced, anchors = (
            {version: other for version, other in known.items() if other is not manifest}
            for known in (self.announced, self.anchors)
        )
        return WeightLog(announced, anchors, self.unreadable)

    def manifest(self, version: int) -> WeightManifest | None:
        """Returns any manifest of `version`, or None."""
        return self.announced.get(version) or self.anchors.get(version)


def read_log(client: Any, keys: Keys) -> WeightLog:
    """Reads the whole log with a synchronous client."""
    with client.pipeline(transaction=False) as both:  # at its memory limit Redis refuses a MULTI, even of reads
        both.xrange(keys.policy)
        both.hgetall(keys.anchors)
        entries, anchors = both.execute()
    unreadable: list[str] = []
    on_stream = ((f"{keys.policy} {name.decode()}", fields.get(Field.MANIFEST)) for name, fields in entries)
    in_hash = ((f"{keys.anchors} {ascii(name)[1:]}", data) for name, data in anchors.items())
    return WeightLog(_manifests(on_stream, unreadable), _manifests(in_hash, unreadable), tuple(unreadable))


def _manifests(found: Iterable[tuple[str, bytes | None]], unreadable: list[str]) -> dict[int, WeightManifest]:
    by_version = {}
    for where, data in found:
        try:
            manifest = decode_manifest(data, where)
            by_version[manifest.version] = manifest
        except ManifestError as error:
            unreadable.append(str(error))
    return by_version


def decode_manifest(data: bytes | None, where: str) -> WeightManifest:
    """Decodes a manifest. Raises ManifestError, which names `where`."""
    try:
        return _decoder.decode(data or b"")
    except msgspec.DecodeError as error:
        raise ManifestError(f"{where} is no manifest: {error}") from None
