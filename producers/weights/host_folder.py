"""The folder of a run's policy on one host: the producers that use it, and the locks under which they read and write.

| file    | its lock (flock)                                                          |
|---------|---------------------------------------------------------------------------|
| `users` | shared by every producer while it lives; the last one removes the folder  |
| `patch` | exclusive for the one producer that fetches and changes bytes             |
| `read`  | shared while engines load; exclusive while bytes change                   |
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from penstock.producers.interfaces import WeightLoadError
from penstock.schemas.config import ConfigError
from penstock.schemas.weights.codec import digest

log = logging.getLogger(__name__)

POLL_S = 0.005
LONG_WAIT_S = 60.0
_LOCKS = ("users", "patch", "read")
_PREFIX = f"penstock-{os.geteuid()}-"


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


class HostFolder:
    """One producer's membership in the folder.

    Locks hold as long as their files exist. If somebody removes the files, the next producer that looks makes new ones,
    with another `lock_id`: a file named by it is never read under one lock and written under another.

    owner: distinguishes runs of one name: the run's id, or the place of its Redis server.
    stopping: ends waits for a lock once it is set.
    lock_id: the inode of `read`; 0 before `join`.

    Raises:
        ConfigError: see `folder_of_copies`.
    """

    def __init__(self, host_folder: str | None, run: str, owner: str) -> None:
        self.parent = folder_of_copies(host_folder)
        self.owner = owner
        self.path = self.parent / f"{_PREFIX}{run}-{digest(owner.encode())[:12]}"
        self.stopping = False
        self.lock_id = 0
        self._locks: dict[str, int] = {}

    def join(self) -> None:
        """Makes the folder if it does not exist, and removes those that no producer uses any more.

        Raises:
            ConfigError: the folder belongs to another user, or `weights.host_folder` is gone.
            OSError: it cannot be created.
        """
        for folder in self.parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _remove_unused(folder)
        while not self._locks:
            with contextlib.suppress(FileNotFoundError):  # removed by another since it was made
                self._make()
                self._open_locks()

    def leave(self) -> None:
        """Leaves the folder; the last producer to leave removes it."""
        self._close_locks()
        with contextlib.suppress(FileNotFoundError):
            _remove_unused(self.path)

    def rejoin_if_removed(self) -> bool:
        """Joins again if lock files were removed under this producer; returns whether they were. Raises as `join`."""
        try:
            if all(_is_at(descriptor, self.path / name) for name, descriptor in self._locks.items()):
                return False
        except FileNotFoundError:
            pass
        log.warning("%s was removed, or files of it: the host's copy is rebuilt", self.path)
        self._close_locks()
        self.join()
        return True

    def lock(self, name: str, *, shared: bool = False) -> None:
        """Waits until the lock is free; its owner's end unblocks it. Raises WeightLoadError if `stopping` is set."""
        self._wait_for(self._locks[name], fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def unlock(self, name: str) -> None:
        if name in self._locks:
            fcntl.flock(self._locks[name], fcntl.LOCK_UN)

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds the lock exclusively inside the block."""
        self.lock(name)
        try:
            yield
        finally:
            self.unlock(name)

    def _wait_for(self, descriptor: int, kind: int) -> None:
        began, is_logged = time.monotonic(), False
        while True:
            if self.stopping:
                raise WeightLoadError("stopped while it waited for the host's copy")
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not is_logged and time.monotonic() - began > LONG_WAIT_S:
                    is_logged = True
                    log.warning("%s is in use by another producer for more than %.0f s", self.path, LONG_WAIT_S)
                time.sleep(POLL_S)

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        except FileNotFoundError:
            folder_of_copies(str(self.parent))
        if not _is_private(self.path):
            raise ConfigError(
                f"weights.host_folder: {self.path} belongs to another user or is open to others; expected a folder "
                "of this user, mode 0700"
            )

    def _open_locks(self) -> None:
        """Takes part as a user, unless the folder was removed meanwhile."""
        users = _open(self.path / "users")
        try:
            self._wait_for(users, fcntl.LOCK_SH)
            if _is_at(users, self.path / "users"):
                self._locks = {"users": users} | {name: _open(self.path / name) for name in _LOCKS[1:]}
                self.lock_id = os.fstat(self._locks["read"]).st_ino
        finally:
            if not self._locks:
                os.close(users)

    def _close_locks(self) -> None:
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks = {}


def _remove_unused(folder: Path) -> None:
    """Removes a folder that no producer uses."""
    if not _is_private(folder):
        return
    users = _open(folder / "users")
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Since its lock file was opened, another may have removed it and a third created a new one.
            if _is_at(users, folder / "users"):
                # Renamed first: a producer that joins now creates a new one, and nothing of that is removed.
                gone = folder.with_name(f"{_PREFIX}{uuid.uuid4().hex}")
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
    finally:
        os.close(users)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the open file is still the one at `path`. Raises FileNotFoundError."""
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
