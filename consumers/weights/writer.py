"""Where a policy's chunks are put, and one attempt to have all ranks put them there."""

import math
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.weights.kept import KeptWeights
from penstock.consumers.weights.shard import DenseError, NoRoomError, PolicyShard, Task, Written
from penstock.schemas.config import ConfigError, WeightsConfig
from penstock.schemas.policy import Chunk, WeightManifest
from penstock.schemas.weights.layout import tensor_bytes
from penstock.schemas.weights.stores import REDIS, ChunkStoreError, RedisFullError

ANCHORS_IN_REDIS = 4
"""Whole policies are kept in Redis by default if this many fit into `weights.redis_mb`."""


class WeightPlaces(NamedTuple):
    """Where this run's chunks are put: "redis", a folder or a URL.

    anchors: None for Redis if the policy is small, `own` otherwise. own: in the run folder. redis_bytes: the most in
        Redis.
    """

    deltas: str
    anchors: str | None
    own: str
    redis_bytes: int

    @classmethod
    def of(cls, config: WeightsConfig, run: str, folder: Path) -> "WeightPlaces":
        """folder: the run's own."""
        anchors = None if config.anchors is None else _of_run(config.anchors, run)
        return cls(_of_run(config.deltas, run), anchors, str(folder.absolute() / "weights"), config.redis_mb << 20)


class PolicyWriter:
    """Has the shards of a policy written by all ranks. Used by the lead's thread.

    shard: of this rank. ranks: of that thread. base_digest: as in `WeightManifest`.

    Raises:
        ConfigError: a place is a URL that cannot be opened.
    """

    def __init__(
        self,
        shard: PolicyShard,
        ranks: Ranks,
        places: WeightPlaces,
        kept: KeptWeights,
        base_digest: str | msgspec.UnsetType,
    ) -> None:
        self._shard = shard
        self._ranks = ranks
        self._places = places
        self._kept = kept
        self._base_digest = base_digest
        self._unfinished: tuple[Task, list[Chunk]] | None = None
        """The last task that a store's failure ended, and what was put for it."""
        self._attempt = 0
        for field, place in (("deltas", places.deltas), ("anchors", places.anchors)):
            if place is not None:
                try:
                    shard.store(place)
                except ConfigError as error:
                    raise ConfigError(f"weights.{field} = {error}") from None

    @property
    def anchors(self) -> str:
        """Where whole policies are put."""
        if self._places.anchors is not None:
            return self._places.anchors
        num_bytes = ANCHORS_IN_REDIS * tensor_bytes(self._shard.snapshots.tensors)
        return REDIS if num_bytes <= self._places.redis_bytes else self._places.own

    @property
    def places(self) -> Collection[str]:
        """Every place where this trainer puts chunks."""
        return {REDIS, self._places.deltas, self.anchors}

    def write(self, version: int, parent: int, before: int | None) -> WeightManifest:
        """Writes a policy as a delta of `before`, or whole if there is none or the delta takes half the bytes or more.
        A delta for which Redis has no room is put where whole policies are.

        Waits for the snapshot. Chunks that were put before a store failed stay until `discard`: the next attempt
        continues with those after them.

        Raises:
            NoRoomError: Redis has no room for it.
            ChunkStoreError: a store does not take a chunk.
        """
        if before is not None:
            try:
                return self._write_delta(version, parent, before)
            except DenseError:
                pass
        return self._write_to(self.anchors, version, parent, before, whole=True)

    def discard(self) -> None:
        """Deletes the chunks of an attempt that failed."""
        self._attempt += 1
        if self._unfinished is not None:
            task, chunks = self._unfinished
            self._unfinished = None
            self._kept.discard(task.place, chunks)
            self._kept.clean()

    def _write_delta(self, version: int, parent: int, before: int) -> WeightManifest:
        try:
            return self._write_to(self._places.deltas, version, parent, before, whole=False)
        except NoRoomError:
            if self.anchors == REDIS:
                raise
            return self._write_to(self.anchors, version, parent, before, whole=False)

    def _write_to(self, place: str, version: int, parent: int, before: int | None, *, whole: bool) -> WeightManifest:
        task = Task(version, before, whole, place, math.inf, self._attempt)
        if self._unfinished is not None and self._unfinished[0] != task:
            self.discard()
            task = task._replace(attempt=self._attempt)
        room = math.inf
        if place == REDIS:
            room = max(0, self._places.redis_bytes - self._kept.bytes_in_redis) / self._ranks.size
        parts = self._ranks.gather(self._shard.write(self._ranks.hand_out(lambda rank: task._replace(room=room))))
        chunks = [chunk for written in parts for chunk in written.chunks]
        failure = _gravest(parts)
        if failure is None:
            self._unfinished = None
            self._attempt += 1  # the same policy again is written from its first chunk on
            return WeightManifest(
                version=version,
                parent_version=parent,
                total_bytes=tensor_bytes(parts[0].tensors),
                tensors=parts[0].tensors,
                delta_of=None if whole else before,
                chunks=tuple(chunks),
                store=place,
                created_s=time.time(),
                base_digest=self._base_digest,
            )
        self._unfinished = task, chunks
        if isinstance(failure, ChunkStoreError) and not isinstance(failure, RedisFullError):
            raise failure
        self.discard()
        if isinstance(failure, NoRoomError):
            raise NoRoomError(self._no_room(whole=whole)) from failure
        if isinstance(failure, RedisFullError):
            raise NoRoomError(str(failure)) from failure
        raise failure

    def _no_room(self, *, whole: bool) -> str:
        used, most = self._kept.bytes_in_redis, self._places.redis_bytes
        needed = tensor_bytes(self._shard.snapshots.tensors)
        return (
            f"Redis has no room for {'' if whole else 'what has changed in '}a policy of {needed:,} bytes beside the "
            f"{used:,} bytes of chunks there: weights.redis_mb = {most >> 20}, expected "
            f"{math.ceil((used + needed) / (1 << 20))} or more, or a folder or URL as weights.anchors"
        )


def _gravest(parts: list[Written]) -> Exception | None:
    """Returns one of the failures, if any: one that waiting cannot help first, and it helps only a store's failure."""
    failures = [written.failure for written in parts if written.failure is not None]
    lasting = (failure for failure in failures if not isinstance(failure, ChunkStoreError))
    return next(lasting, failures[0] if failures else None)


def _of_run(place: str, run: str) -> str:
    if place == REDIS:
        return place
    return f"{place.rstrip('/')}/{run}" if "://" in place else str(Path(place).absolute() / run)
