"""Publishes policies while training continues: chunks into a store, then the manifest that announces them.

snapshot   the masters are rounded into host memory            the optimizer waits for it, on every rank
           snapshots.py
write      each rank compares, encodes and puts its shards     waits for the snapshot, and for room in the store
           writer.py, shard.py
announce   the lead's script, on the policy stream             -
clean      older policies are dropped, then their chunks       -
           kept.py
anchor     now and then the policy is written whole as well    -
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from penstock.consumers.learning.ranks import Ranks
from penstock.consumers.stream.scripts import FencedError, Scripts
from penstock.consumers.weights.kept import KeptWeights
from penstock.consumers.weights.shard import NoRoomError, PolicyShard
from penstock.consumers.weights.worker import Worker
from penstock.consumers.weights.writer import PolicyWriter, WeightPlaces
from penstock.schemas.policy import WeightManifest
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import ChunkStoreError

log = logging.getLogger(__name__)

RETRY_S = 1.0
FULL_LOG_S = 30.0
END_S = 5.0
"""How long a trainer that ends waits for its last publication; a fenced one deletes its chunks."""


class Publication(NamedTuple):
    """One announced manifest.

    version: of the policy. num_bytes: of its chunks. changed_frac: share of the elements that it changes; None for an
        anchor of a policy that was announced before. chain: deltas since the newest anchor. redis_bytes: of all chunks
        in Redis. is_whole: an anchor.
    """

    version: int
    num_bytes: int
    changed_frac: float | None
    chain: int
    redis_bytes: int
    is_whole: bool


class Publisher:
    """Writes each policy, announces it and cleans up after it, on the lead rank, in a thread.

    One publication is under way at a time. An error that ends it without an announcement is raised by the next call of
    `publish`, `check` or `wait`.

    shard: of this rank. ranks: those that share the model. on_published: called in the thread. base_digest: as in
    `WeightManifest`. pinned: see `KeptWeights`.

    Raises:
        ConfigError: see `PolicyWriter`.
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
        self._reader = WeightReader(scripts.connection.call, scripts.keys)
        self._shard, self._ranks, self._beside = shard, ranks, ranks.for_thread("publisher")
        self._kept = KeptWeights(shard.store, keep_versions, pinned)
        self._writer = PolicyWriter(shard, self._beside, places, self._kept, base_digest)
        self._on_published = on_published
        self._newest: tuple[int, int, bool] | None = None
        """Of the last policy announced: version, parent version, and True for an epoch's first one after a resume."""
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

        thoroughly: compares each of these chunks with its digest; otherwise existence is enough.

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
        before = None if self._newest is None else self._newest[0]
        if before is None:
            self._kept.load(self._reader.log())
        self._shard.snapshots.wait()
        self._announce(self._write(version, parent, before), fork=fork)
        self._newest = version, parent, fork
        done.set_result(None)
        if before is None:
            self._kept.sweep(self._writer.places)
        self._kept.clean()
        if self._kept.anchor_is_due and (problem := self._write_anchor(version, parent)):
            log.warning("anchor of policy %d is not written: %s; the next policy is tried", version, problem)

    def _restore(self, done: Future[None], thoroughly: bool) -> None:
        assert self._newest is not None
        version, parent, fork = self._newest
        self._kept.load(self._reader.log())
        if self._kept.newest != version or not self._kept.can_be_read(version, self._reader if thoroughly else None):
            log.warning("policy %d is announced again: the log has lost it, or chunks on the way to it", version)
            self._announce(self._write(version, parent, None), fork=fork)
        done.set_result(None)
        self._kept.sweep(self._writer.places)
        self._kept.clean()

    def _write(self, version: int, parent: int, before: int | None) -> WeightManifest:
        """Writes a policy as `PolicyWriter.write` does. Waits while a store is full or unreachable;
        `TrainerConnection.stop` ends the wait.

        Raises:
            ChunkStoreError: the trainer was told to stop.
        """
        next_line_at = 0.0
        while True:
            try:
                return self._writer.write(version, parent, before)
            except (NoRoomError, ChunkStoreError) as error:
                problem = error
            if isinstance(problem, NoRoomError) and self._make_room(version, before):
                continue
            if self._scripts.connection.stopping or self._ended:
                self._writer.discard()
                raise ChunkStoreError(f"policy {version} cannot be written: {problem}") from problem
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + FULL_LOG_S
                log.error("policy %d cannot be written: %s; training waits until it can", version, problem)
            self._scripts.connection.pause(RETRY_S)

    def _make_room(self, version: int, before: int | None) -> bool:
        """Drops older policies from Redis, even ones that should be kept; returns False if there are none.

        Those are the versions before the newest anchor. If there are none, the newest policy is first written as an
        anchor. Before the first policy of an epoch all earlier ones are dropped: `version` follows at once.
        """
        anchor, newest = self._kept.newest_anchor, self._kept.newest
        if anchor is not None and self._kept.has_older_than(anchor):
            oldest = anchor
        elif before is not None and newest == before and anchor != newest and self._newest is not None:
            if self._write_anchor(before, self._newest[1]):
                return False
            oldest = before
        elif self._newest is None and self._kept.manifests:
            oldest = version
        else:
            return False
        log.warning("policies before %d are dropped: weights.redis_mb has no room for more", oldest)
        self._scripts.announce(version, b"", b"", oldest)
        self._kept.forget_before(oldest)
        self._kept.clean()
        return True

    def _write_anchor(self, version: int, parent: int) -> Exception | None:
        """Writes the newest policy whole if there is room; returns the error if there is none."""
        try:
            manifest = self._writer.write(version, parent, None)
        except (ChunkStoreError, NoRoomError) as error:
            self._writer.discard()
            return error
        self._announce(manifest, anchor_only=True)
        self._kept.clean()
        return None

    def _announce(self, manifest: WeightManifest, *, fork: bool = False, anchor_only: bool = False) -> None:
        """Appends a manifest to the stream, adds a whole one to the anchors, and drops versions that are not kept."""
        manifest = msgspec.structs.replace(manifest, run_id=self._scripts.run_id)
        version, is_whole, encoded = manifest.version, manifest.delta_of is None, msgspec.json.encode(manifest)
        oldest = self._kept.oldest_to_keep(version, is_anchor=is_whole)
        stream, anchor = b"" if anchor_only else encoded, encoded if is_whole else b""
        parent = manifest.parent_version if fork else None
        try:
            self._scripts.announce(version, stream, anchor, oldest, parent)
        except FencedError:
            self._kept.discard(manifest.store, manifest.chunks)
            self._kept.clean()
            raise
        self._kept.add(manifest, announced=not anchor_only)
        self._kept.forget_before(oldest)
        self._on_published(
            Publication(
                version=version,
                num_bytes=manifest.chunk_bytes,
                changed_frac=None if anchor_only else manifest.num_changed / max(1, manifest.num_elements),
                chain=len(self._kept.deltas),
                redis_bytes=self._kept.bytes_in_redis,
                is_whole=is_whole,
            )
        )
