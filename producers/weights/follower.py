"""Follows the policy stream: updates the host's copy while the engine samples, then loads the newest policy."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from penstock.producers.interfaces import Engine, WeightLoadError
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import BLOCK_MS, ProducerConnection
from penstock.producers.weights.host_copy import HostCopy
from penstock.schemas.keys import Field, Keys
from penstock.schemas.policy import WeightManifest, steps_behind
from penstock.schemas.weights.log import ManifestError, decode_manifest

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
MANIFESTS_PER_READ = 64


class WeightFollower:
    """The policy that the engine holds, and the newest one announced.

    newest: the last manifest of the policy stream; None before the first one.
    loaded: True once the engine holds weights that were announced. Before that it serves nothing.
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
    ) -> None:
        self._connection = connection
        self._stream = keys.policy
        self._engine = engine
        self._copy = copy
        self._held: WeightManifest | None = None
        self._metrics = metrics
        self._on_load = on_load
        self._cursor: bytes | None = None
        self._recoveries_seen = -1
        self._changed = asyncio.Event()
        self.newest: WeightManifest | None = None
        self.loaded = False
        self.num_failed = 0
        self.last_error = ""

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

    async def wait_for(self, version: int, lag_bound: int) -> None:
        """Waits until the engine is at most `lag_bound` steps behind `version`."""
        while not self.loaded or steps_behind(self._engine.policy_version, version) > lag_bound:
            await self._changed.wait()

    async def follow(self) -> None:
        """Waits for manifests on the policy stream; the trainer's announcements unblock it. Runs until cancelled."""
        while True:
            manifest = await self._connection.retrying(self._read)
            if manifest is None:
                if self.newest is None and self._cursor is None:
                    log.info("waiting for the first weights on %s", self._stream)
                    self._cursor = b"0-0"
                continue
            self.newest = manifest
            self._notify()

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
        if self._recoveries_seen != self._connection.num_recoveries or self._cursor is None:
            # Read the newest entry again, wherever the cursor was: a Redis that came back may hold another stream.
            entries: Any = await self._connection.blocking.xrevrange(self._stream, count=1)
            self._recoveries_seen = self._connection.num_recoveries
            if not entries:
                return None
        else:
            reply: Any = await self._connection.blocking.xread(
                {self._stream: self._cursor}, MANIFESTS_PER_READ, BLOCK_MS
            )
            entries = reply[0][1][-1:] if reply else []
        if not entries:
            return None
        self._cursor, fields = entries[0]
        try:
            return decode_manifest(fields.get(Field.MANIFEST), f"{self._stream} entry {self._cursor!r}")
        except ManifestError as error:
            self._metrics.weight_loads.labels("failed").inc()
            self.num_failed += 1
            self.last_error = str(error)
            log.error("%s; policy %d serves on", self.last_error, self._engine.policy_version)
            return None

    async def _load(self, wanted: WeightManifest) -> None:
        started, before = time.monotonic(), self._copy.num_bytes
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
        self.loaded = True
        self.last_error = ""
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
