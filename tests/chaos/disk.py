"""A small file system for the checkpoint folder, which the suite can fill."""

import ctypes
import errno
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
SIZE_BYTES = 8 << 20


def enter_namespace() -> bool:
    """Gives this process its own mount table, so that its mounts end with it; returns False if the system forbids it.
    Must be called before any thread is started."""
    user, group = os.getuid(), os.getgid()
    if user == 0:
        if _LIBC.unshare(_CLONE_NEWNS):
            return False
    else:
        if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
            return False
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError:
            return False
    return _LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0


class SmallDisk:
    """A tmpfs of `SIZE_BYTES` at `folder`.

    Raises:
        OSError: it cannot be mounted.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        options = f"size={SIZE_BYTES},mode=755".encode()
        if _LIBC.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options):
            raise OSError(ctypes.get_errno(), f"{folder}: no tmpfs can be mounted there")
        self._folder = folder
        self._filler = folder / ".filler"

    def fill(self, room: int) -> None:
        """Fills the disk except for `room` bytes. Files deleted later free space again; if files are written meanwhile,
        it tries again with the space that is left."""
        with self._filler.open("ab") as file:
            while True:
                stat = os.statvfs(self._folder)
                wanted = max(0, stat.f_bavail * stat.f_frsize - room)
                if not wanted:
                    return
                try:
                    return os.posix_fallocate(file.fileno(), 0, file.seek(0, os.SEEK_END) + wanted)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def drain(self) -> None:
        """Frees the space again."""
        self._filler.unlink(missing_ok=True)

    def remove(self) -> None:
        _LIBC.umount2(os.fsencode(self._folder), 2)
