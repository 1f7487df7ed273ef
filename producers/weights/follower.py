"""Follows the policy stream: updates the host's copy while the engine samples, then loads the newest policy."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.producers.interfaces import Engine, WeightLoadError
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import BLOCK_MS, ProducerConnection
from penstock.producers.weights.host_copy import HostCopy, UnreadableWeightsError, identity
from penstock.schemas.keys import Field, Keys, entry_key
from penstock.schemas.policy import UNKNOWN_VERSION, WeightManifest, steps_behind
from penstock.schemas.weights.log import ManifestError, decode_manifest
from penstock.schemas.weights.stores import ChunkStoreError

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
MANIFESTS_PER_READ = 64


class WeightFollower:
    """The policy that the engine holds, and the newest one announced.

    A run that is begun anew under its name announces the same versions again: it is recognized by its id or, without
    one, by a stream that was emptied. Its weights are loaded before anything more is served.

    newest: the last manifest of the policy stream; None before the first one, and while the stream is empty.
    loaded: True once the engine holds weights that the run has announced. Before that it serves nothing.
    unreadable_version: see `penstock.schemas.heartbeat.Heartbeat`.
    on_run: takes the id of the run that is followed, once it is known and whenever it is another.
    on_load: takes, of each load, `policy_version`; `prefetch_s` until the host's copy was up to date, for which this
        producer fetched `bytes`; `load_s` in the engine, and `pause_s` of it in which no token was sampled.
    """

    def __init__(
        self,
        connection: ProducerConnection,
        keys: Keys,
        engine: Engine,
        copy: HostCopy,
        metrics: ProducerMetrics,
        on_load: Callable[..., None] = lambda **load: None,
        on_run: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._connection = connection
        self._stream = keys.policy
        self._engine = engine
        self._copy = copy
        self._held: WeightManifest | None = None
        self._metrics = metrics
        self._on_load = on_load
        self._on_run = on_run
        self._run_id: str | None = None
        self._num_runs = 0
        self._cursor: bytes | None = None
        self._seen: tuple[bytes, bytes | None] | None = None
        """Id and content of the last entry read."""
        self._is_rewound = False
        """True if the stream was emptied, or begun anew, before the last entry read."""
        self._changed = asyncio.Event()
        self.newest: WeightManifest | None = None
        self.loaded = False
        self.num_failed = 0
        self.last_error = ""
        self.unreadable_version = UNKNOWN_VERSION

    @property
    def run_id(self) -> str:
        """The id of the run whose weights the engine holds; empty before the first load."""
        return "" if self._held is None else self._held.run_id

    @property
    def behind(self) -> float:
        """Optimizer steps between the engine's policy and the newest; infinite before the first load."""
        if not self.loaded or self.newest is None:
            return float("inf")
        return steps_behind(self._engine.policy_version, self.newest.version)

    async def wait_until_current(self, lag_bound: int) -> None:
        """Waits until the engine is at most `lag_bound` steps behind the newest policy."""
        while self.behind > lag_bound:
            await self._changed.wait()

    async def wait_for(self, version: int, lag_bound: int, run_id: str = "") -> None:
        """Waits until the engine is at most `lag_bound` steps behind `version` of run `run_id`, of any if that is
        empty."""
        while not self._serves(run_id) or steps_behind(self._engine.policy_version, version) > lag_bound:
            await self._changed.wait()

    def _serves(self, run_id: str) -> bool:
        return self.loaded and self.newest is not None and run_id in ("", self.run_id)

    async def follow(self) -> None:
        """Waits for manifests on the policy stream; the trainer's announcements unblock it. Runs until cancelled."""
        while True:
            manifest = await self._connection.retrying(self._read)
            if manifest is None:
                if self.newest is None and self._cursor is None:
                    log.info("waiting for the first weights on %s", self._stream)
                    self._cursor = b"0-0"
                continue
            if self._is_of_another_run(manifest):
                log.warning(
                    "%s: another run of this name has begun (%s, after %s): joining it",
                    self._stream,
                    manifest.run_id or "without an id",
                    self.run_id or "one without an id",
                )
                self.loaded = False
                self._num_runs += 1
            if manifest.run_id != self._run_id:
                self._run_id = manifest.run_id
                if self._on_run is not None:
                    await self._on_run(manifest.run_id)
            self.newest = manifest
            self._notify()

    def _is_of_another_run(self, manifest: WeightManifest) -> bool:
        """Returns whether the engine's weights are not of this manifest's run."""
        held = self._held
        if held is None or held.run_id != manifest.run_id:
            return held is not None
        return self._is_rewound and not manifest.run_id and identity(manifest) != identity(held)

    async def keep_current(self) -> None:
        """Waits for a policy newer than the engine's, which `follow` unblocks; brings the host's copy to it and loads
        it into the engine. Runs until cancelled.

        Only the newest is loaded: versions announced meanwhile are skipped. After a failure the old version stays in
        use, and the newest is tried again with growing pauses.

        Raises:
            ConfigError: the host's copy cannot be kept where the run file says.
            EngineError: the engine serves no longer.
        """
        retry_s = FIRST_RETRY_S
        try:
            await asyncio.to_thread(self._copy.open)
            while True:
                manifest = self.newest
                if manifest is None or (self.loaded and manifest.version == self._engine.policy_version):
                    await self._changed.wait()
                    continue
                try:
                    await self._load(manifest)
                    retry_s = FIRST_RETRY_S
                except (WeightLoadError, OSError) as error:
                    if self.newest is not manifest:
                        # Once a newer policy is announced, chunks that lead to this one may be deleted.
                        log.info("policy %d was superseded while it was fetched: %s", manifest.version, error)
                        continue
                    self._note_failure(manifest, error)
                    await self._pause(retry_s * random.uniform(0.5, 1.0))
                    retry_s = min(2 * retry_s, LONGEST_RETRY_S)
        finally:
            await asyncio.to_thread(self._copy.close)

    async def _read(self) -> WeightManifest | None:
        """Returns the newest manifest not yet seen, or None after `BLOCK_MS`."""
        entries: Any = []
        if self._cursor is not None:
            reply: Any = await self._connection.blocking.xread(
                {self._stream: self._cursor}, MANIFESTS_PER_READ, BLOCK_MS
            )
            entries = reply[0][1][-1:] if reply else []
        if not entries:
            # The newest entry, wherever the cursor is: the stream may have been emptied, and filled by another run.
            entries = await self._connection.blocking.xrevrange(self._stream, count=1)
        if not entries:
            self._note_emptied()
            return None
        entry_id, fields = entries[0]
        if self._seen == (entry_id, fields.get(Field.MANIFEST)):
            return None
        self._is_rewound = self._seen is None or entry_key(entry_id) <= entry_key(self._seen[0])
        self._seen = entry_id, fields.get(Field.MANIFEST)
        self._cursor = entry_id
        try:
            return decode_manifest(fields.get(Field.MANIFEST), f"{self._stream} entry {self._cursor!r}")
        except ManifestError as error:
            self._metrics.weight_loads.labels("failed").inc()
            self.num_failed += 1
            self.last_error = str(error)
            log.error("%s; policy %d serves on", self.last_error, self._engine.policy_version)
            return None

    def _note_emptied(self) -> None:
        """Begins at the start of the stream again, and serves nothing more until a policy is announced."""
        if self._seen is not None:
            log.warning("%s is empty: waiting for the trainer to announce a policy", self._stream)
            self._seen, self._cursor, self.newest = None, b"0-0", None

    async def _load(self, wanted: WeightManifest) -> None:
        started, before, num_runs = time.monotonic(), self._copy.num_bytes, self._num_runs
        manifest = await asyncio.to_thread(self._copy.lock_at, wanted)
        prefetch_s = time.monotonic() - started
        try:
            if self.newest is wanted and manifest.version != wanted.version:
                self.newest = manifest  # the copy is ahead of what `follow` has read
            if self.loaded and manifest.version == self._engine.policy_version:
                return
            started = time.monotonic()
            restore = None if self._held is None else self._restore
            pause_s = await self._engine.load_weights(manifest, str(self._copy.path), restore)
        finally:
            self._copy.release()
        load_s = time.monotonic() - started
        if not self.loaded:
            log.info("policy %d is loaded: ready to serve", manifest.version)
        self.loaded = num_runs == self._num_runs  # another run may have begun meanwhile
        self.last_error, self.unreadable_version = "", UNKNOWN_VERSION
        self._held = manifest
        # The age at the load by the trainer's clock and this one, then this one's alone: a step of it is no age.
        age_s = max(0.0, time.time() - manifest.created_s) if manifest.created_s else 0.0
        loaded_s = time.monotonic()
        self._metrics.policy_age_s.set_function(lambda: age_s + time.monotonic() - loaded_s)
        self._metrics.weight_loads.labels("loaded").inc()
        self._metrics.pause_s.observe(pause_s)
        self._metrics.prefetch_s.observe(prefetch_s)
        self._on_load(
            policy_version=manifest.version,
            pause_s=pause_s,
            load_s=load_s,
            prefetch_s=prefetch_s,
            bytes=self._copy.num_bytes - before,
        )
        self._notify()

    async def _restore(self) -> str:
        """Brings the host's copy back to the policy that the engine held before a load that failed."""
        assert self._held is not None
        await asyncio.to_thread(self._copy.lock_at, self._held, exactly=True)
        return str(self._copy.path)

    def _note_failure(self, manifest: WeightManifest, error: Exception) -> None:
        self.num_failed += 1
        self.last_error = f"policy {manifest.version}: {error}"
        is_unreadable = isinstance(error, UnreadableWeightsError | ChunkStoreError)
        self.unreadable_version = manifest.version if is_unreadable else UNKNOWN_VERSION
        self._metrics.weight_loads.labels("failed").inc()
        serving = f"policy {self._engine.policy_version} serves on" if self.loaded else "nothing is served yet"
        log.error("weights not loaded: %s; %s", self.last_error, serving)

    async def _pause(self, seconds: float) -> None:
        """Waits for a change, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify(self) -> None:
        """Wakes every task that is waiting for a change."""
        self._metrics.policy_version.set(self._engine.policy_version)
        if self.behind != float("inf"):
            self._metrics.policy_behind.set(max(0, self.behind))
        self._changed.set()
        self._changed = asyncio.Event()
