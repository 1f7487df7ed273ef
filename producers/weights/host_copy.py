"""One copy of the policy per host and run, shared by its producers: patched in place while engines sample."""

import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import redis

from penstock.producers.interfaces import WeightLoadError
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.weights.host_folder import LONG_WAIT_S, HostFolder
from penstock.schemas.config import ConfigError
from penstock.schemas.policy import Chunk, WeightManifest
from penstock.schemas.process.files import write_whole
from penstock.schemas.weights.codec import ChunkError, Part, apply, digest
from penstock.schemas.weights.layout import Layout, LayoutError
from penstock.schemas.weights.log import VersionGoneError, WeightLog
from penstock.schemas.weights.reading import WeightReader, create, layout_of, verify

log = logging.getLogger(__name__)

SMALL = 0.15
"""A change of up to this share of the policy's bytes is fetched before any byte is written."""


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """The policy in the copy. lock_id: of the folder when it was written."""

    policy: WeightManifest
    lock_id: int


class UnreadableWeightsError(WeightLoadError):
    """The log does not lead to a policy, or a chunk on the way to it is lost or wrong."""


class _UnavailableError(Exception):
    """A manifest whose chunks are not available."""

    def __init__(self, manifest: WeightManifest, reason: Exception) -> None:
        self.manifest, self.reason = manifest, reason


def identity(manifest: WeightManifest) -> str:
    """Returns a digest that is equal for policies with the same tensors and bits, however they are chunked."""
    pieces = sorted((piece.tensor, piece.start, piece.digest) for chunk in manifest.chunks for piece in chunk.pieces)
    return digest(msgspec.msgpack.encode((manifest.tensors, pieces)))


class HostCopy:
    """A safetensors file that engines map, beside the locks of its `HostFolder`.

    | file                      | what it is                                                          |
    |---------------------------|---------------------------------------------------------------------|
    | `weights-<n>.safetensors` | the policy, its room reserved; n is the folder's `lock_id`          |
    | `state`                   | the manifest of the policy in it; absent while bytes are changed    |

    Bytes that are changed without leaving a state (the process was killed, a chunk was wrong) are dirty: the next
    producer that needs the copy writes it anew from a whole policy.

    One instance serves one producer; its methods are called by one thread at a time, `close` by any.

    place: of the Redis server, which distinguishes runs of one name whose manifests name no run.
    num_bytes: fetched so far.

    Raises:
        ConfigError: see `host_folder.folder_of_copies`.
    """

    def __init__(
        self, host_folder: str | None, run: str, place: str, reader: WeightReader, metrics: ProducerMetrics
    ) -> None:
        self._host = HostFolder(host_folder, run, place)
        self._run, self._is_closed = run, False
        self._reader = reader
        self._metrics = metrics
        self._is_verified = False
        """True once this producer has compared the copy's bits with the digests of its state."""
        self._log_progress_at = 0.0
        self._busy = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._reader.num_bytes

    @property
    def folder(self) -> Path:
        return self._host.path

    @property
    def path(self) -> Path:
        """The file to load from; it changes when `lock_at` finds the locks removed."""
        return self.folder / f"weights-{self._host.lock_id}.safetensors"

    def open(self) -> None:
        """Joins the copy, creating it if it does not exist. Raises as `HostFolder.join`."""
        self._is_verified = False
        self._host.join()

    def lock_at(self, wanted: WeightManifest, *, exactly: bool = False) -> WeightManifest:
        """Brings the copy to `wanted`, or to a policy announced since; with `exactly`, to `wanted` itself.

        The copy stays at that policy until `release`, for an engine to load it. Waits for a producer that changes the
        copy, which its end unblocks, and for engines that load from it.

        Returns:
            The manifest of the policy in the copy, each piece of which has been compared with its digest.

        Raises:
            UnreadableWeightsError: the log does not lead there, or a chunk is not what was announced.
            WeightLoadError: there is no room, or the copy is closed.
            OSError: a chunk store fails.
            ConfigError: see `HostFolder.join`.
        """
        with self._busy:
            if self._host.stopping:
                raise WeightLoadError("the host's copy is closed")
            self.release()
            self._join(wanted.run_id)
            self._log_progress_at = time.monotonic() + LONG_WAIT_S
            with self._host.locked("patch"):
                try:
                    policy = self._bring_to(wanted, exactly)
                except (ChunkError, VersionGoneError) as error:
                    raise UnreadableWeightsError(str(error)) from error
                except (ConfigError, redis.RedisError) as error:
                    raise WeightLoadError(str(error)) from error
                self._host.lock("read", shared=True)
                return policy

    def release(self) -> None:
        """Lets others change the copy."""
        self._host.unlock("read")

    def close(self) -> None:
        """Ends a running `lock_at` and leaves the copy; the last producer to leave removes it."""
        self._is_closed = self._host.stopping = True
        with self._busy:
            self._host.leave()

    def _join(self, run_id: str) -> None:
        """Joins the copy of this run, whatever address of Redis its other producers use, and again if it was removed.
        Raises as `HostFolder.join`."""
        if run_id and run_id != self._host.owner:
            self._host.leave()
            self._host = HostFolder(str(self._host.parent), self._run, run_id)
            self._host.stopping |= self._is_closed
            self.open()
        elif self._host.rejoin_if_removed():
            self._is_verified = False

    def _bring_to(self, wanted: WeightManifest, exactly: bool) -> WeightManifest:
        """Returns the policy that the copy holds from now on: `wanted` or, unless `exactly`, the newest announced."""
        held, problem = self._held()
        if self._is_at(held, wanted):
            return wanted
        if held is not None and held.run_id != wanted.run_id:
            held = None  # its versions are another run's
        if held is not None and held.version == wanted.delta_of and not exactly:
            try:
                self._change(held, [wanted], wanted, problem)
                return wanted
            except _UnavailableError:
                held, _ = self._held()
            except ChunkError as error:
                log.warning("the host's copy is rebuilt: %s", error)
                held, problem = None, "wrong"
        weights = self._reader.log()
        announced = [policy for policy in weights.announced.values() if policy.run_id == wanted.run_id]
        target = wanted if exactly else max((wanted, *announced), key=lambda policy: policy.version)
        if not self._is_at(held, target):
            self._bring_by(weights, target, held, problem)
        return target

    def _bring_by(self, weights: WeightLog, target: WeightManifest, held: WeightManifest | None, problem: str) -> None:
        """Tries the chains of the log that lead to `target`, the one of fewest bytes first."""
        failure: Exception | None = None
        while True:
            try:
                chain = weights.chain(target.version, None if held is None else held.version)
            except VersionGoneError as gone:
                raise failure or gone from None
            try:
                return self._change(held, chain, target, problem)
            except _UnavailableError as error:
                failure, weights = error.reason, weights.without(error.manifest)
                held = None if held is None else self._held()[0]
            except ChunkError as error:
                if chain and chain[0].delta_of is None:
                    raise
                log.warning("the host's copy is rebuilt: %s", error)
                failure, held, problem = error, None, "wrong"

    def _is_at(self, held: WeightManifest | None, policy: WeightManifest) -> bool:
        """Returns whether the copy holds `policy`; it may have been announced again since, after a resume."""
        if held is None or identity(held) != identity(policy):
            return False
        if (held.run_id, held.version) != (policy.run_id, policy.version):
            self._set_state(policy)
        return True

    def _held(self) -> tuple[WeightManifest | None, str]:
        """Returns the policy in the copy, None if there is none that can be used, and the reason to rebuild the copy
        if that has to be done: `new`, `dirty`, `wrong` (other bits than its state says) or `behind`."""
        try:
            state = msgspec.json.decode((self.folder / "state").read_bytes(), type=_State)
            held, layout = state.policy, Layout(state.policy.tensors)
            with self.path.open("rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == layout.num_bytes and state.lock_id == self._host.lock_id
                if not is_whole or file.read(len(layout.header)) != layout.header:
                    return None, "dirty"
            if not self._is_verified:
                verify(held, layout_of(held), _mapped(self.path))
                self._is_verified = True
        except (FileNotFoundError, msgspec.DecodeError, LayoutError):
            return None, "dirty" if self.path.exists() else "new"
        except ChunkError as error:
            log.warning("the host's copy is rebuilt: %s", error)
            return None, "wrong"
        return held, "behind"

    def _change(
        self, held: WeightManifest | None, chain: list[WeightManifest], target: WeightManifest, problem: str
    ) -> None:
        """Changes the copy from `held` by `chain`, and compares it with `target`. Waits until no engine loads, and
        lets none load meanwhile; the copy is dirty until it is known to be `target`.

        Raises:
            _UnavailableError: a chunk is not available.
            ChunkError: a chunk does not fit the policy, or the result is not `target`.
        """
        layout = layout_of(target)
        is_rebuild = bool(chain) and chain[0].delta_of is None
        for manifest in chain if is_rebuild or held is None else (held, *chain):
            if manifest.tensors != target.tensors:
                raise ChunkError(f"policy {target.version}: other tensors than those of policy {manifest.version}")
        chunks: Iterable[list[Part]] = (self._fetch(manifest, chunk) for manifest in chain for chunk in manifest.chunks)
        if not is_rebuild and sum(manifest.chunk_bytes for manifest in chain) <= SMALL * layout.tensor_bytes:
            chunks = list(chunks)
        with self._host.locked("read"), self._metrics.patch_s.time():
            (self.folder / "state").unlink(missing_ok=True)
            file = self._create(layout) if is_rebuild else _mapped(self.path)
            for parts in chunks:
                apply(parts, layout, file)
            verify(target, layout, file)
            self._set_state(target)
        self._metrics.weight_chain.set(len(chain))
        if is_rebuild and (held is None or target.delta_of is not None):
            self._metrics.copies_rebuilt.labels(problem).inc()

    def _fetch(self, manifest: WeightManifest, chunk: Chunk) -> list[Part]:
        if self._host.stopping:
            raise WeightLoadError("stopped while it fetched weights")
        before = self._reader.num_bytes
        if time.monotonic() >= self._log_progress_at:
            self._log_progress_at = time.monotonic() + LONG_WAIT_S
            number, num_chunks = 1 + manifest.chunks.index(chunk), len(manifest.chunks)
            where, version = manifest.store, manifest.version
            log.info("still fetching weights: chunk %d of %d of policy %d in %s", number, num_chunks, version, where)
        try:
            return self._reader.parts(manifest, chunk)
        except (ChunkError, ConfigError, OSError) as error:
            raise _UnavailableError(manifest, error) from error
        finally:
            self._metrics.weight_bytes.inc(self._reader.num_bytes - before)

    def _create(self, layout: Layout) -> mmap.mmap:
        # A new file: one that another process has mapped must not get shorter.
        for old in self.folder.glob("weights-*"):
            old.unlink(missing_ok=True)
        try:
            return create(self.path, layout)
        except OSError as error:
            room = self._host.parent
            raise WeightLoadError(
                f"no room for the policy in weights.host_folder = {str(room)!r}: {error.strerror}, "
                f"{shutil.disk_usage(room).free:,} are free"
            ) from error

    def _set_state(self, policy: WeightManifest) -> None:
        """Records which policy the copy holds, once its bits were compared with their digests."""
        state = _State(policy=policy, lock_id=self._host.lock_id)
        write_whole(self.folder / "state", msgspec.json.encode(state), mode=0o600)
        self._is_verified = True


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
