"""What of the weight log is kept: the last versions, and the anchors that lead to them."""

from collections.abc import Callable, Collection
from typing import Any

from penstock.schemas.keys import Keys
from penstock.schemas.policy import WeightManifest
from penstock.schemas.weights.log import VersionGoneError, WeightLog, read_log
from penstock.schemas.weights.stores import REDIS, Call

LONGEST_CHAIN = 512
"""Deltas between two anchors: each has a manifest in Redis, which takes more room than its chunks where little changes.
"""


class KeptWeights:
    """The manifests in Redis, as this trainer knows them.

    keep_versions: the last so many can be got back. pinned: so can these, of those announced.
    """

    def __init__(self, keep_versions: int, pinned: Callable[[], Collection[int]] = frozenset) -> None:
        self._keep_versions = keep_versions
        self._pinned = pinned
        self._announced: dict[int, WeightManifest] = {}
        self._anchors: dict[int, WeightManifest] = {}

    def load(self, call: Call[Any], keys: Keys) -> None:
        """Takes what is in Redis, in place of what was known. Raises ManifestError."""
        log: WeightLog = call(lambda client: read_log(client, keys))
        self._announced = dict(log.announced)
        # Of the two Redis may have lost one.
        whole = {version: each for version, each in log.announced.items() if each.delta_of is None}
        self._anchors = whole | dict(log.anchors)

    def add(self, manifest: WeightManifest, *, announced: bool) -> None:
        if announced:
            self._announced[manifest.version] = manifest
        if manifest.delta_of is None:
            self._anchors[manifest.version] = manifest

    @property
    def manifests(self) -> list[WeightManifest]:
        return [*self._announced.values(), *self._anchors.values()]

    @property
    def newest(self) -> int | None:
        return max(self._announced, default=None)

    @property
    def newest_anchor(self) -> int | None:
        return max(self._anchors, default=None)

    def floor(self, *added: int, anchor: int | None = None) -> int:
        """The oldest version that is kept, with `added` announced and `anchor` written: the newest anchor that is not
        newer than the last `keep_versions` and those pinned; 0 if there is none."""
        known = {*self._announced, *added}
        oldest = min([sorted(known)[-self._keep_versions :][0], *(known & {*self._pinned()})])
        anchors = {*self._anchors} if anchor is None else {*self._anchors, anchor}
        return max((version for version in anchors if version <= oldest), default=0)

    def is_below(self, version: int) -> bool:
        """Whether anything older than `version` is kept."""
        return any(manifest.version < version for manifest in self.manifests)

    def drop_below(self, floor: int) -> list[WeightManifest]:
        """Forgets older versions; returns their manifests."""
        dropped = [manifest for manifest in self.manifests if manifest.version < floor]
        for known in (self._announced, self._anchors):
            for version in [version for version in known if version < floor]:
                del known[version]
        return dropped

    def way(self, version: int) -> list[WeightManifest]:
        """The manifests that lead to a version; none if nothing does."""
        try:
            return WeightLog(self._announced, self._anchors).way(version)
        except VersionGoneError:
            return []

    @property
    def deltas(self) -> list[WeightManifest]:
        """Those announced after the newest anchor."""
        anchor = self.newest_anchor
        return [each for version, each in self._announced.items() if anchor is None or version > anchor]

    @property
    def anchor_is_due(self) -> bool:
        """Whether the deltas since the newest anchor add up to half of its bytes, or are many."""
        anchor = self.newest_anchor
        if anchor is None or not self.deltas:
            return False
        return (
            len(self.deltas) >= LONGEST_CHAIN
            or 2 * sum(delta.chunk_bytes for delta in self.deltas) >= self._anchors[anchor].chunk_bytes
        )

    @property
    def bytes_in_redis(self) -> int:
        chunks = {
            chunk.key: chunk.num_bytes
            for manifest in self.manifests
            if manifest.store == REDIS
            for chunk in manifest.chunks
        }
        return sum(chunks.values())
