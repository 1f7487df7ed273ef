"""One copy of the policy per host and run, shared by its producers: patched in place while engines sample."""

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import redis

from penstock.producers.interfaces import WeightLoadError
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.schemas.config import ConfigError
from penstock.schemas.policy import Chunk, WeightManifest
from penstock.schemas.process.files import write_whole
from penstock.schemas.weights.codec import ChunkError, Part, apply, digest, pack, unpack
from penstock.schemas.weights.layout import Layout, LayoutError
from penstock.schemas.weights.log import VersionGoneError, WeightLog
from penstock.schemas.weights.reading import WeightReader, create, layout_of, verify

log = logging.getLogger(__name__)

SMALL = 0.15
"""A change of up to this share of the policy's bytes is fetched before any byte is written, and can be undone."""
POLL_S = 0.005
LONG_WAIT_S = 60.0
_PREFIX = f"penstock-{os.geteuid()}-"


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """The policy in the copy. locks: the inode of the lock file under which it was written."""

    policy: WeightManifest
    locks: int


class _Undo(msgspec.Struct, frozen=True, kw_only=True):
    """Restores the policy `to` in a copy that holds the policy with the identity `of`. parts: a chunk."""

    of: str
    to: WeightManifest
    parts: bytes


class _UnavailableError(Exception):
    """A manifest whose chunks are not available."""

    def __init__(self, manifest: WeightManifest, reason: Exception) -> None:
        self.manifest, self.reason = manifest, reason


def default_folder() -> Path:
    """Returns /dev/shm, or the system's temporary folder without one."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def folder_of_copies(host_folder: str | None) -> Path:
    """Returns the folder that `weights.host_folder` names.

    Raises:
        ConfigError: it does not exist, or cannot be written to.
    """
    folder = default_folder() if host_folder is None else Path(host_folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"weights.host_folder = {str(folder)!r}: expected a folder that this user can write to")
    return folder


def identity(manifest: WeightManifest) -> str:
    """Returns a digest that is equal for policies with the same tensors and bits, however they are chunked."""
    pieces = sorted((piece.tensor, piece.start, piece.digest) for chunk in manifest.chunks for piece in chunk.pieces)
    return digest(msgspec.msgpack.encode((manifest.tensors, pieces)))


class HostCopy:
    """This host's copy of a run's policy: a safetensors file that engines map, in a folder with its locks.

    | file                      | what it is                                                                    |
    |---------------------------|-------------------------------------------------------------------------------|
    | `weights-<n>.safetensors` | the policy, its room reserved; n is the inode of `read`                       |
    | `state`                   | the manifest of the policy in the copy; absent while bytes are changed        |
    | `undo`                    | undoes the last change, if that was small                                     |
    | `users`                   | locked by every producer while it lives; the last one removes the folder      |
    | `patch`                   | locked by the one producer that fetches and changes bytes                     |
    | `read`                    | shared while engines load; exclusive while bytes change                       |

    A wait for `patch` ends when another producer has fetched, or dies; a wait for `read` to change bytes, when loads
    end. One instance serves one producer; its methods are called by one thread at a time, `close` by any.

    Locks hold as long as their files exist. If somebody removes the files, new ones are made, and with them another
    copy; an engine that still loads from the old one finds the old bits, or none.

    place: of the Redis server, which distinguishes runs of one name.
    num_bytes: fetched so far.

    Raises:
        ConfigError: see `folder_of_copies`.
    """

    def __init__(
        self, host_folder: str | None, run: str, place: str, reader: WeightReader, metrics: ProducerMetrics
    ) -> None:
        self._host_folder = folder_of_copies(host_folder)
        self.folder = self._host_folder / f"{_PREFIX}{run}-{digest(place.encode())[:12]}"
        self._reader = reader
        self._metrics = metrics
        self._locks: dict[str, int] = {}
        self._inode = 0
        self._has_compared = False
        """True once this producer has compared the copy's bits with the digests of its state."""
        self._tell_at = 0.0
        self._stopping = False
        self._busy = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._reader.num_bytes

    @property
    def path(self) -> Path:
        """The file to load from; it changes when `lock_at` finds the locks removed."""
        return self.folder / f"weights-{self._inode}.safetensors"

    def open(self) -> None:
        """Joins the copy, creating it if it does not exist, and removes copies that no producer uses any more.

        Raises:
            ConfigError: the folder belongs to another user, or `weights.host_folder` is gone.
            OSError: it cannot be created.
        """
        self._has_compared = False
        for folder in self._host_folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._sweep(folder)
        while "users" not in self._locks:
            with contextlib.suppress(FileNotFoundError):  # swept since it was made
                self._make_folder()
                users = _open(self.folder / "users")
                try:
                    self._lock(users, fcntl.LOCK_SH)
                    if os.path.samestat(os.fstat(users), os.stat(self.folder / "users")):
                        self._locks = {"users": users} | {name: _open(self.folder / name) for name in ("patch", "read")}
                        self._inode = os.fstat(self._locks["read"]).st_ino
                finally:
                    if "users" not in self._locks:
                        os.close(users)

    def lock_at(self, wanted: WeightManifest, *, exactly: bool = False) -> WeightManifest:
        """Brings the copy to `wanted`, or to a policy announced since; with `exactly`, to `wanted` itself.

        The copy stays at that policy until `release`, for an engine to load it.

        Returns:
            The manifest of the policy in the copy, each piece of which has been compared with its digest.

        Raises:
            WeightLoadError: the log does not lead there, a chunk is not what was announced, or there is no room.
            OSError: a chunk store fails.
            ConfigError: see `open`.
        """
        with self._busy:
            if self._stopping:
                raise WeightLoadError("the host's copy is closed")
            self.release()
            if not self._has_its_locks():
                log.warning("%s was removed, or files of it: the host's copy is rebuilt", self.folder)
                self._leave()
                self.open()
            patch, read = self._locks["patch"], self._locks["read"]
            self._lock(patch, fcntl.LOCK_EX)
            self._tell_at = time.monotonic() + LONG_WAIT_S
            try:
                target = self._move(wanted, exactly)
                self._lock(read, fcntl.LOCK_SH)
                return target
            except (ChunkError, VersionGoneError, ConfigError, redis.RedisError) as error:
                raise WeightLoadError(str(error)) from error
            finally:
                fcntl.flock(patch, fcntl.LOCK_UN)

    def release(self) -> None:
        """Lets others change the copy."""
        if self._locks:
            fcntl.flock(self._locks["read"], fcntl.LOCK_UN)

    def close(self) -> None:
        """Ends a running `lock_at` and leaves the copy; the last producer to leave removes it."""
        self._stopping = True
        with self._busy:
            if self._locks:
                self._leave()
                with contextlib.suppress(FileNotFoundError):
                    self._sweep(self.folder)

    def _has_its_locks(self) -> bool:
        try:
            return all(
                os.path.samestat(os.fstat(descriptor), os.stat(self.folder / name))
                for name, descriptor in self._locks.items()
            )
        except FileNotFoundError:
            return False

    def _leave(self) -> None:
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks = {}

    def _sweep(self, folder: Path) -> None:
        """Removes a copy that no producer uses."""
        if not _is_own(folder):
            return
        users = _open(folder / "users")
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Since its lock file was opened, another may have removed it and a third created a new one.
                if os.path.samestat(os.fstat(users), os.stat(folder / "users")):
                    # Renamed first: a producer that joins now creates a new one, and nothing of that is removed.
                    gone = folder.with_name(f"{_PREFIX}{uuid.uuid4().hex}")
                    folder.rename(gone)
                    shutil.rmtree(gone, ignore_errors=True)
        finally:
            os.close(users)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except FileNotFoundError:
            folder_of_copies(str(self._host_folder))
        if not _is_own(self.folder):
            raise ConfigError(
                f"weights.host_folder: {self.folder} belongs to another user or is open to others; expected a folder "
                "of this user, mode 0700"
            )

    def _lock(self, descriptor: int, kind: int) -> None:
        began, is_told = time.monotonic(), False
        while True:
            if self._stopping:
                raise WeightLoadError("stopped while it waited for the host's copy")
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not is_told and time.monotonic() - began > LONG_WAIT_S:
                    is_told = True
                    log.warning("%s is in use by another producer for more than %.0f s", self.folder, LONG_WAIT_S)
                time.sleep(POLL_S)

    def _held(self) -> WeightManifest | None:
        """Returns the policy in the copy; None if there is none, or a torn one."""
        try:
            state = msgspec.json.decode((self.folder / "state").read_bytes(), type=_State)
            layout = Layout(state.policy.tensors)
            with self.path.open("rb") as file:
                is_whole = os.fstat(file.fileno()).st_size == layout.num_bytes and state.locks == self._inode
                return state.policy if is_whole and file.read(len(layout.header)) == layout.header else None
        except (FileNotFoundError, msgspec.DecodeError, LayoutError):
            return None

    def _move(self, wanted: WeightManifest, exactly: bool) -> WeightManifest:
        held = self._held()
        reason = "behind" if held is not None else "dirty" if self.path.exists() else "new"
        if held is not None and not self._has_compared:
            try:
                verify(held, layout_of(held), _mapped(self.path))
                self._has_compared = True
            except ChunkError as error:
                log.warning("the host's copy is rebuilt: %s", error)
                held, reason = None, "wrong"
        if held is not None and identity(held) == identity(wanted):
            if held.version != wanted.version:  # announced again, after a resume
                self._set_state(wanted)
            return wanted
        if exactly and held is not None:
            if self._take_back(held, wanted):
                return wanted
            held = self._held()
        target, is_next = wanted, not exactly and held is not None and wanted.delta_of == held.version
        found = WeightLog({wanted.version: wanted}, {}) if is_next else self._reader.log()
        if not is_next and not exactly:
            target = max((wanted, *found.announced.values()), key=lambda manifest: manifest.version)
            if held is not None and identity(held) == identity(target):
                return target
        failure: Exception | None = None
        while True:
            try:
                way = found.way(target.version, None if held is None else held.version)
            except VersionGoneError as gone:
                if is_next:
                    is_next, found = False, self._reader.log()
                    continue
                raise failure or gone from None
            is_whole = bool(way) and way[0].delta_of is None
            try:
                self._apply(way, target, held)
            except _UnavailableError as error:
                failure, found = error.reason, _without(found, error.manifest)
                held = None if held is None else self._held()
            except ChunkError as error:
                if is_whole:
                    raise
                log.warning("the host's copy is rebuilt: %s", error)
                failure, held, reason = error, None, "wrong"
            else:
                break
        self._metrics.weight_chain.set(len(way))
        if is_whole and (held is None or target.delta_of is not None):
            self._metrics.copies_rebuilt.labels(reason).inc()
        return target

    def _apply(self, way: list[WeightManifest], target: WeightManifest, held: WeightManifest | None) -> None:
        """Changes the copy from `held` by `way`, and compares it with `target`.

        Raises:
            _UnavailableError: a chunk is not available.
            ChunkError: a chunk does not fit the policy, or the result is not `target`.
        """
        layout = layout_of(target)
        is_whole = bool(way) and way[0].delta_of is None
        for manifest in way if is_whole or held is None else (held, *way):
            if manifest.tensors != target.tensors:
                raise ChunkError(f"policy {target.version}: other tensors than those of policy {manifest.version}")
        fetched: Iterable[list[Part]] = (self._fetch(manifest, chunk) for manifest in way for chunk in manifest.chunks)
        is_small = not is_whole and sum(manifest.chunk_bytes for manifest in way) <= SMALL * layout.tensor_bytes
        if is_small:
            fetched = list(fetched)
        with self._changing():
            file = self._create(layout) if is_whole else _mapped(self.path)
            undo: list[Part] = []
            for parts in fetched:
                apply(parts, layout, file, undo if is_small else None)
            verify(target, layout, file)
            if held is not None and is_small and sum(len(part.values) for part in undo) <= SMALL * layout.tensor_bytes:
                self._keep_undo(_Undo(of=identity(target), to=held, parts=pack(undo[::-1])))
            self._set_state(target)

    def _fetch(self, manifest: WeightManifest, chunk: Chunk) -> list[Part]:
        if self._stopping:
            raise WeightLoadError("stopped while it fetched weights")
        before = self._reader.num_bytes
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + LONG_WAIT_S
            number, num_chunks = 1 + manifest.chunks.index(chunk), len(manifest.chunks)
            where, version = manifest.store, manifest.version
            log.info("still fetching weights: chunk %d of %d of policy %d in %s", number, num_chunks, version, where)
        try:
            return self._reader.parts(manifest, chunk)
        except (ChunkError, ConfigError, OSError) as error:
            raise _UnavailableError(manifest, error) from error
        finally:
            self._metrics.weight_bytes.inc(self._reader.num_bytes - before)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Waits until no engine loads, and lets none load inside; the copy is dirty until a state is set."""
        read = self._locks["read"]
        self._lock(read, fcntl.LOCK_EX)
        began = time.monotonic()
        try:
            for name in ("state", "undo"):
                (self.folder / name).unlink(missing_ok=True)
            yield
        finally:
            fcntl.flock(read, fcntl.LOCK_UN)
            self._metrics.patch_s.observe(time.monotonic() - began)

    def _create(self, layout: Layout) -> mmap.mmap:
        # A new file: one that another process has mapped must not get shorter.
        for old in self.folder.glob("weights-*"):
            old.unlink(missing_ok=True)
        try:
            return create(self.path, layout)
        except OSError as error:
            raise WeightLoadError(
                f"no room for the policy in weights.host_folder = {str(self._host_folder)!r}: {error.strerror}, "
                f"{shutil.disk_usage(self._host_folder).free:,} are free"
            ) from error

    def _take_back(self, held: WeightManifest, wanted: WeightManifest) -> bool:
        """Undoes the last change if that leads to `wanted`; returns whether it did."""
        try:
            undo = msgspec.msgpack.decode((self.folder / "undo").read_bytes(), type=_Undo)
        except (FileNotFoundError, msgspec.DecodeError):
            return False
        if undo.of != identity(held) or identity(undo.to) != identity(wanted):
            return False
        layout = layout_of(wanted)
        try:
            with self._changing():
                file = _mapped(self.path)
                apply(unpack(undo.parts), layout, file)
                verify(wanted, layout, file)
                self._set_state(wanted)
        except ChunkError as error:
            log.warning("the last change of the host's copy cannot be taken back: %s", error)
            return False
        return True

    def _set_state(self, manifest: WeightManifest) -> None:
        """Records which policy the copy holds, once its bits were compared with their digests."""
        state = _State(policy=manifest, locks=self._inode)
        write_whole(self.folder / "state", msgspec.json.encode(state), mode=0o600)
        self._has_compared = True

    def _keep_undo(self, undo: _Undo) -> None:
        try:
            write_whole(self.folder / "undo", msgspec.msgpack.encode(undo), mode=0o600)
        except OSError as error:
            log.warning("a failed load of the next policy will be taken back by the log alone: %s", error)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _is_own(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _without(found: WeightLog, manifest: WeightManifest) -> WeightLog:
    def rest(manifests: Any) -> dict[int, WeightManifest]:
        return {version: one for version, one in manifests.items() if one is not manifest}

    return WeightLog(rest(found.announced), rest(found.anchors))
