"""The part of the weight log that is kept, the last versions and the anchors that lead to them; the rest is deleted."""

import logging
import re
from collections.abc import Callable, Collection, Iterable

from penstock.schemas.policy import Chunk, WeightManifest
from penstock.schemas.weights.codec import ChunkError
from penstock.schemas.weights.log import VersionGoneError, WeightLog
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import REDIS, ChunkStore, ChunkStoreError

log = logging.getLogger(__name__)

LONGEST_CHAIN = 512
"""The most deltas between two anchors. The manifest of each in Redis takes more room than its chunks if little changes.
"""
_KEY = re.compile(r"(\d+)-(delta|whole)-\d+-\d+")


class KeptWeights:
    """The manifests in Redis, as this trainer knows them, and the chunks that they no longer name.

    store: opens the store at a place. keep_versions: the number of last versions that can be read. pinned: announced
    versions that can be read too.
    """

    def __init__(
        self, store: Callable[[str], ChunkStore], keep_versions: int, pinned: Callable[[], Collection[int]]
    ) -> None:
        self._store = store
        self._keep_versions = keep_versions
        self._pinned = pinned
        self._announced: dict[int, WeightManifest] = {}
        self._anchors: dict[int, WeightManifest] = {}
        self._garbage: dict[str, set[str]] = {}
        """Keys of unneeded chunks that are not deleted yet, by place."""

    def load(self, weights: WeightLog) -> None:
        """Replaces what is known by what is in Redis."""
        self._announced = dict(weights.announced)
        # Redis may have lost either of the two.
        whole = {version: manifest for version, manifest in weights.announced.items() if manifest.delta_of is None}
        self._anchors = whole | dict(weights.anchors)

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

    @property
    def deltas(self) -> list[WeightManifest]:
        """The manifests announced after the newest anchor."""
        anchor = self.newest_anchor
        return [manifest for version, manifest in self._announced.items() if anchor is None or version > anchor]

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
        in_redis = (manifest.chunks for manifest in self.manifests if manifest.store == REDIS)
        return sum({chunk.key: chunk.num_bytes for chunks in in_redis for chunk in chunks}.values())

    def chain(self, version: int) -> list[WeightManifest]:
        """Returns the manifests that lead to a version, if any do."""
        try:
            return WeightLog(self._announced, self._anchors).chain(version)
        except VersionGoneError:
            return []

    def can_be_read(self, version: int, reader: WeightReader | None) -> bool:
        """Returns whether all chunks that lead to a version, from the newest anchor on, are where they were put; with a
        reader, whether their bytes are those that were put."""
        chain = self.chain(version)
        try:
            if reader is not None:
                for manifest in chain:
                    for chunk in manifest.chunks:
                        reader.parts(manifest, chunk)
                return bool(chain)
            keys = {manifest.store: set(self._store(manifest.store).keys()) for manifest in chain}
        except (ChunkStoreError, ChunkError) as error:
            log.warning("%s", error)
            return False  # if the store is away: writing waits for it, and says so
        return bool(chain) and all(chunk.key in keys[manifest.store] for manifest in chain for chunk in manifest.chunks)

    def oldest_to_keep(self, added: int, *, is_anchor: bool) -> int:
        """Returns the oldest version to keep once `added` is announced, as an anchor if `is_anchor`: the newest anchor
        that is not newer than the last `keep_versions` and those pinned; 0 if there is none."""
        known = {*self._announced, added}
        oldest = min([sorted(known)[-self._keep_versions :][0], *(known & {*self._pinned()})])
        anchors = {*self._anchors, *([added] if is_anchor else [])}
        return max((version for version in anchors if version <= oldest), default=0)

    def has_older_than(self, version: int) -> bool:
        return any(manifest.version < version for manifest in self.manifests)

    def forget_before(self, oldest: int) -> None:
        """Removes the manifests of older versions; `clean` deletes their chunks."""
        for manifest in self.manifests:
            if manifest.version < oldest:
                self.discard(manifest.store, manifest.chunks)
        self._announced, self._anchors = (
            {version: manifest for version, manifest in known.items() if version >= oldest}
            for known in (self._announced, self._anchors)
        )

    def discard(self, place: str, chunks: Iterable[Chunk]) -> None:
        """Has `clean` delete these chunks."""
        self._garbage.setdefault(place, set()).update(chunk.key for chunk in chunks)

    def clean(self) -> None:
        """Deletes chunks that no manifest names; those that cannot be deleted are tried again with the next policy."""
        named = {chunk.key for manifest in self.manifests for chunk in manifest.chunks}
        try:
            for place in list(self._garbage):
                self._store(place).delete(self._garbage[place] - named)
                del self._garbage[place]
        except ChunkStoreError as error:
            log.warning("chunks that nobody needs are not deleted: %s", error)

    def sweep(self, places: Collection[str]) -> None:
        """Has `clean` delete what a crash left in the stores, of versions up to the newest."""
        newest = self.newest or 0
        try:
            for place in places:
                keys = ((key, _KEY.match(key)) for key in self._store(place).keys())  # noqa: SIM118
                left = {key for key, match in keys if match is not None and int(match[1]) <= newest}
                self._garbage.setdefault(place, set()).update(left)
        except ChunkStoreError as error:
            log.warning("chunks that a crash left are not deleted: %s", error)
