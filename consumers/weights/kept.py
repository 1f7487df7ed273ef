"""The part of the weight log that is kept: the last versions, and the anchors that lead to them."""

from collections.abc import Callable, Collection
from typing import Any

from penstock.schemas.keys import Keys
from penstock.schemas.policy import WeightManifest
from penstock.schemas.weights.log import VersionGoneError, WeightLog, read_log
from penstock.schemas.weights.stores import REDIS, Call

LONGEST_CHAIN = 512
"""The most deltas between two anchors. The manifest of each in Redis takes more room than its chunks if little changes.
"""


class KeptWeights:
    """The manifests in Redis, as this trainer knows them.

    keep_versions: the number of last versions that can be read. pinned: announced versions that can be read too.
    """

    def __init__(self, keep_versions: int, pinned: Callable[[], Collection[int]] = frozenset) -> None:
        self._keep_versions = keep_versions
        self._pinned = pinned
        self._announced: dict[int, WeightManifest] = {}
        self._anchors: dict[int, WeightManifest] = {}

    def load(self, call: Call[Any], keys: Keys) -> None:
        """Replaces what is known by what is in Redis. Raises ManifestError."""
        log: WeightLog = call(lambda client: read_log(client, keys))
        self._announced = dict(log.announced)
        # Redis may have lost either of the two.
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

    def floor(self, added: int, *, is_anchor: bool) -> int:
        """Returns the oldest version to keep once `added` is announced, as an anchor if `is_anchor`: the newest anchor
        that is not newer than the last `keep_versions` and those pinned; 0 if there is none."""
        known = {*self._announced, added}
        oldest = min([sorted(known)[-self._keep_versions :][0], *(known & {*self._pinned()})])
        anchors = {*self._anchors, *([added] if is_anchor else [])}
        return max((version for version in anchors if version <= oldest), default=0)

    def is_below(self, version: int) -> bool:
        """Returns whether any version older than `version` is kept."""
        return any(manifest.version < version for manifest in self.manifests)

    def drop_below(self, floor: int) -> list[WeightManifest]:
        """Removes older versions; returns their manifests."""
        dropped = [manifest for manifest in self.manifests if manifest.version < floor]
        for known in (self._announced, self._anchors):
            for version in [version for version in known if version < floor]:
                del known[version]
        return dropped

    def chain(self, version: int) -> list[WeightManifest]:
        """Returns the manifests that lead to a version, if any do."""
        try:
            return WeightLog(self._announced, self._anchors).chain(version)
        except VersionGoneError:
            return []

    @property
    def deltas(self) -> list[WeightManifest]:
        """The manifests announced after the newest anchor."""
        anchor = self.newest_anchor
        return [each for version, each in self._announced.items() if anchor is None or version > anchor]

    @property
    def anchor_is_due(self) -> bool:
        """True if the deltas since the newest anchor are many or reach half of its bytes."""
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
