"""Publishes policies while training continues: chunks into a store, then the manifest that announces them.

snapshot   the masters are rounded into host memory            the optimizer waits for it, on every rank
           snapshots.py
write      each rank compares, encodes and puts its shards     waits for the snapshot, and for room in the store
           shard.py
announce   the lead's script, on the policy stream             -
clean      older policies are dropped, then their chunks       -
           kept.py
anchor     now and then the policy is written whole as well    -
"""

import contextlib
import functools
import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.stream.scripts import FencedError, Scripts
from penstock.consumers.weights.kept import KeptWeights
from penstock.consumers.weights.shard import DenseError, NoRoomError, PolicyShard, Task, Written
from penstock.consumers.weights.worker import Worker
from penstock.schemas.config import ConfigError, WeightsConfig
from penstock.schemas.policy import Chunk, WeightManifest
from penstock.schemas.weights.codec import ChunkError
from penstock.schemas.weights.layout import tensor_bytes
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import REDIS, ChunkStoreError, RedisFullError

log = logging.getLogger(__name__)

RETRY_S = 1.0
FULL_LOG_S = 30.0
END_S = 5.0
"""How long a trainer that ends waits for its last publication; a fenced one deletes its chunks."""
ANCHORS_IN_REDIS = 4
"""Whole policies are kept in Redis by default if this many fit into `weights.redis_mb`."""

_KEY = re.compile(r"(\d+)-(delta|whole)-\d+-\d+")


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


class Publication(NamedTuple):
    """One announced manifest.

    num_bytes: of its chunks. changed_frac: share of the elements that it changes; None for an anchor of a policy that
        was announced before. chain: deltas since the newest anchor. redis_bytes: of all chunks in Redis. is_whole: an
        anchor.
    """

    num_bytes: int
    changed_frac: float | None
    chain: int
    redis_bytes: int
    is_whole: bool


class Publisher:
    """Decides, on the lead rank, where and how each policy is written, and announces it.

    One publication is under way at a time. An error that ends it without an announcement is raised by the next call of
    `publish`, `check` or `wait`.

    shard: of this rank. ranks: those that share the model. on_published: called in the thread. base_digest: as in
    `WeightManifest`. pinned: see `KeptWeights`.
    """

    def __init__(
        self,
        scripts: Scripts,
        shard: PolicyShard,
        ranks: Ranks,
        places: WeightPlaces,
        keep_versions: int,
        on_published: Callable[[Publication], None] = lambda publication: None,
        base_digest: str | msgspec.UnsetType = msgspec.UNSET,
        pinned: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._scripts = scripts
        self._shard, self._ranks, self._beside = shard, ranks, ranks.for_thread("publisher")
        self._places = places
        for field, place in (("deltas", places.deltas), ("anchors", places.anchors)):
            if place is not None:
                try:
                    shard.store(place)  # before anything is trained: it may be a URL that cannot be opened
                except ConfigError as error:
                    raise ConfigError(f"weights.{field} = {error}") from None
        self._kept = KeptWeights(keep_versions, pinned)
        self._on_published = on_published
        self._base_digest = base_digest
        self._newest: tuple[int, int, bool] | None = None
        """Of the last policy announced: version, parent version, and True for an epoch's first one after a resume."""
        self._garbage: dict[str, set[str]] = {}
        """Keys of unneeded chunks that could not be deleted yet, by place."""
        self._compared = -1
        """The version whose chunks were read back."""
        self._attempts = itertools.count(1)
        self._under_way: Future[None] = Future()
        self._under_way.set_result(None)
        self._worker = Worker("publisher")
        self._failure: BaseException | None = None
        """An error after the announcement, which ends the thread."""
        self._ended = False
        self._blocked_s = 0.0

    def publish(self, version: int, parent_version: int, *, fork: bool = False) -> None:
        """Begins to publish the current weights as policy `version`. `fork` records `parent_version` as the version
        that this epoch's first policy equals.

        Waits for the previous announcement; room in the store and Redis unblock it.

        Raises:
            OSError, RedisGoneError, FencedError: see `wait`.
        """
        began_s = time.monotonic()
        self.wait()
        self._ranks.order("publish", lambda rank: (version,))
        self._shard.snapshots.begin(version)
        self._start(self._publish, version, parent_version, fork)
        self._blocked_s += time.monotonic() - began_s

    def wait(self) -> None:
        """Returns once the last policy is announced.

        Raises:
            OSError: a store takes no chunks, and the trainer was told to stop.
            RedisGoneError: see `TrainerConnection.call`.
            FencedError: a newer trainer owns the run.
        """
        while not self._under_way.done():
            with contextlib.suppress(TimeoutError):
                self._under_way.exception(FULL_LOG_S)
                break
            log.info("training waits for a policy to be written: %s", self._shard.progress)
        self._under_way.result()
        if self._failure is not None:
            raise self._failure

    def check(self) -> None:
        """Raises what `wait` would, without waiting."""
        if self._under_way.done():
            self.wait()

    def wait_for_snapshot(self) -> None:
        """Returns once the masters may change."""
        began_s = time.monotonic()
        self._shard.snapshots.wait()
        self._blocked_s += time.monotonic() - began_s

    def take_blocked_s(self) -> float:
        """Returns the seconds that `publish` and `wait_for_snapshot` took since the last call."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        return blocked_s

    def end(self) -> None:
        """Waits `END_S` at most for a publication under way, which no longer waits for room, then ends the threads."""
        self._ended = True
        with contextlib.suppress(Exception):  # the trainer ends already, for a reason of its own
            self._under_way.result(END_S)
        self._worker.end()
        self._shard.snapshots.end()

    def announce_again(self, *, thoroughly: bool = False) -> None:
        """Begins to write the newest policy whole and announce it, unless it is announced and all chunks that lead to
        it exist. Called after Redis has lost data.

        thoroughly: compares each of these chunks with its digest, once per version; otherwise existence is enough.

        Raises:
            OSError, RedisGoneError, FencedError: see `wait`.
        """
        self.wait()
        if self._newest is not None:
            self._start(self._restore, thoroughly)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self._under_way = Future()
        self._worker.give(functools.partial(self._run, self._under_way, work, arguments))

    def _run(self, done: Future[None], work: Callable[..., None], arguments: tuple[object, ...]) -> None:
        try:
            if self._failure is not None:
                raise self._failure
            self._beside.phase = "publish"
            work(done, *arguments)
        except BaseException as error:
            if done.done():
                self._failure = error
            else:
                done.set_exception(error)
        finally:
            self._beside.phase = ""

    def _publish(self, done: Future[None], version: int, parent: int, fork: bool) -> None:
        is_first = self._newest is None
        if is_first:
            self._kept.load(self._scripts.connection.call, self._scripts.keys)
        self._shard.snapshots.wait()
        before = self._newest[0] if self._newest is not None else None
        manifest = self._write(version, parent, before, whole=is_first)
        self._announce(manifest, fork=fork)
        self._newest = version, parent, fork
        done.set_result(None)
        self._clean(sweep=is_first)
        if self._kept.anchor_is_due and (problem := self._write_anchor(version, parent)):
            log.warning("anchor of policy %d is not written: %s; the next policy is tried", version, problem)

    def _restore(self, done: Future[None], thoroughly: bool) -> None:
        assert self._newest is not None
        version, parent, fork = self._newest
        self._kept.load(self._scripts.connection.call, self._scripts.keys)
        if self._kept.newest != version or not self._can_be_read(version, thoroughly):
            log.warning("policy %d is announced again: the log has lost it, or chunks on the way to it", version)
            self._announce(self._write(version, parent, None, whole=True), fork=fork)
        done.set_result(None)
        self._clean(sweep=True)

    def _can_be_read(self, version: int, thoroughly: bool) -> bool:
        """Returns whether all chunks that lead to a version, from the newest anchor on, are where they were put."""
        chain = self._kept.chain(version)
        try:
            if thoroughly and self._compared != version:
                reader = WeightReader(self._scripts.connection.call, self._scripts.keys)
                for manifest in chain:
                    for chunk in manifest.chunks:
                        reader.parts(manifest, chunk)
                self._compared = version
                return bool(chain)
            places = {manifest.store: set(self._shard.store(manifest.store).keys()) for manifest in chain}
        except (ChunkStoreError, ChunkError) as error:
            log.warning("%s", error)
            return False  # if the store is away: writing waits for it, and says so
        return bool(chain) and all(
            chunk.key in places[manifest.store] for manifest in chain for chunk in manifest.chunks
        )

    def _write_anchor(self, version: int, parent: int) -> Exception | None:
        """Writes the newest policy whole if there is room; returns the error if there is none."""
        try:
            manifest = self._write(version, parent, None, whole=True, may_wait=False)
        except (ChunkStoreError, NoRoomError) as error:
            return error
        self._announce(manifest, anchor_only=True)
        self._clean()
        return None

    def _announce(self, manifest: WeightManifest, *, fork: bool = False, anchor_only: bool = False) -> None:
        """Appends a manifest to the stream, adds a whole one to the anchors, and drops versions that are not kept."""
        version, is_whole, encoded = manifest.version, manifest.delta_of is None, msgspec.json.encode(manifest)
        floor = self._kept.floor(version, is_anchor=is_whole)
        stream, anchor = b"" if anchor_only else encoded, encoded if is_whole else b""
        parent = manifest.parent_version if fork else None
        try:
            self._scripts.announce(version, stream, anchor, floor, parent)
        except FencedError:
            self._discard(manifest.store, manifest.chunks)
            self._clean()
            raise
        self._kept.add(manifest, announced=not anchor_only)
        self._forget_below(floor)
        self._on_published(
            Publication(
                num_bytes=manifest.chunk_bytes,
                changed_frac=None if anchor_only else manifest.num_changed / max(1, manifest.num_elements),
                chain=len(self._kept.deltas),
                redis_bytes=self._kept.bytes_in_redis,
                is_whole=is_whole,
            )
        )

    def _write(
        self, version: int, parent: int, before: int | None, *, whole: bool, may_wait: bool = True
    ) -> WeightManifest:
        """Has all ranks write their shards: a delta of `before`, or whole if `whole` is set or the delta takes half the
        bytes or more.

        Waits while a store is full or unreachable; `TrainerConnection.stop` ends the wait.

        Raises:
            ChunkStoreError: the trainer was told to stop, or `may_wait` is unset.
            NoRoomError: Redis has no room and `may_wait` is unset.
        """
        next_line_at = 0.0
        place = self._anchors if whole else self._places.deltas
        attempt = next(self._attempts)
        while True:
            room = math.inf
            if place == REDIS:
                room = max(0, self._places.redis_bytes - self._kept.bytes_in_redis) / self._ranks.size
            found = self._on_all_ranks(Task(version, before, whole, place, room, attempt))
            chunks = [chunk for written in found for chunk in written.chunks]
            failure = _gravest(found)
            if failure is None:
                return WeightManifest(
                    version=version,
                    parent_version=parent,
                    total_bytes=tensor_bytes(found[0].tensors),
                    tensors=found[0].tensors,
                    delta_of=None if whole else before,
                    chunks=tuple(chunks),
                    store=place,
                    created_s=time.time(),
                    base_digest=self._base_digest,
                )
            has_no_room = isinstance(failure, NoRoomError | RedisFullError)
            if has_no_room or not isinstance(failure, ChunkStoreError):
                self._discard(place, chunks)
                self._clean()
                attempt = next(self._attempts)
            if isinstance(failure, DenseError):
                whole, place = True, self._anchors
                continue
            if has_no_room:
                if self._anchors != REDIS:
                    place = self._anchors
                    continue
                if may_wait and self._make_room(version, before):
                    continue
                if isinstance(failure, NoRoomError):
                    failure = NoRoomError(self._no_room(whole=whole))
            if not isinstance(failure, ChunkStoreError | NoRoomError):
                raise failure
            if not may_wait or self._scripts.connection.stopping or self._ended:
                self._discard(place, chunks)
                self._clean()
                if may_wait:
                    raise ChunkStoreError(f"policy {version} cannot be written: {failure}") from failure
                raise failure
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + FULL_LOG_S
                log.error("policy %d cannot be written: %s; training waits until it can", version, failure)
            self._scripts.connection.pause(RETRY_S)

    def _on_all_ranks(self, task: Task) -> list[Written]:
        return self._beside.gather(self._shard.write(self._beside.hand_out(lambda rank: task)))

    @property
    def _anchors(self) -> str:
        """Where whole policies are put."""
        if self._places.anchors is not None:
            return self._places.anchors
        num_bytes = ANCHORS_IN_REDIS * tensor_bytes(self._shard.snapshots.tensors)
        return REDIS if num_bytes <= self._places.redis_bytes else self._places.own

    def _make_room(self, version: int, before: int | None) -> bool:
        """Drops older policies from Redis, even ones that should be kept; returns False if there are none.

        Those are the versions below the newest anchor. If there are none, the newest policy is first written as an
        anchor. Before the first policy of an epoch all earlier ones are dropped: `version` follows at once.
        """
        anchor, newest = self._kept.newest_anchor, self._kept.newest
        if anchor is not None and self._kept.is_below(anchor):
            floor = anchor
        elif before is not None and newest == before and anchor != newest and self._newest is not None:
            if self._write_anchor(before, self._newest[1]):
                return False
            floor = before
        elif self._newest is None and self._kept.manifests:
            floor = version
        else:
            return False
        log.warning("policies before %d are dropped: weights.redis_mb has no room for more", floor)
        self._scripts.announce(version, b"", b"", floor)
        self._forget_below(floor)
        self._clean()
        return True

    def _no_room(self, *, whole: bool) -> str:
        used, most = self._kept.bytes_in_redis, self._places.redis_bytes
        needed = tensor_bytes(self._shard.snapshots.tensors)
        return (
            f"Redis has no room for {'' if whole else 'what has changed in '}a policy of {needed:,} bytes beside the "
            f"{used:,} bytes of chunks there: weights.redis_mb = {most >> 20}, expected "
            f"{math.ceil((used + needed) / (1 << 20))} or more, or a folder or URL as weights.anchors"
        )

    def _forget_below(self, floor: int) -> None:
        for manifest in self._kept.drop_below(floor):
            self._discard(manifest.store, manifest.chunks)

    def _discard(self, place: str, chunks: Iterable[Chunk]) -> None:
        self._garbage.setdefault(place, set()).update(chunk.key for chunk in chunks)

    def _clean(self, *, sweep: bool = False) -> None:
        """Deletes chunks that no manifest names; those that cannot be deleted are tried again with the next policy.

        sweep: also deletes chunks that a crash left in the stores, of versions up to the newest.
        """
        named = {chunk.key for manifest in self._kept.manifests for chunk in manifest.chunks}
        try:
            if sweep:
                newest = self._newest[0] if self._newest is not None else 0
                for place in {REDIS, self._places.deltas, self._anchors}:
                    keys = self._shard.store(place).keys()
                    left = {key for key in keys if (version := _KEY.match(key)) and int(version[1]) <= newest}
                    self._garbage.setdefault(place, set()).update(left)
            for place in list(self._garbage):
                self._shard.store(place).delete(self._garbage[place] - named)
                del self._garbage[place]
        except ChunkStoreError as error:
            log.warning("chunks that nobody needs are not deleted: %s", error)


def _gravest(found: list[Written]) -> Exception | None:
    """Returns one of the failures, if any: one that waiting cannot help first, and it helps only a store's failure."""
    failures = [written.failure for written in found if written.failure is not None]
    return next((each for each in failures if not isinstance(each, ChunkStoreError)), failures[0] if failures else None)


def _of_run(place: str, run: str) -> str:
    if place == REDIS:
        return place
    return f"{place.rstrip('/')}/{run}" if "://" in place else str(Path(place).absolute() / run)
