"""Atomic writes of files, by renaming; digests of files; files that hold a secret."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.schemas.config import ConfigError


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path in the folder of `file` to write to. At the end of the block it is renamed to `file`; after an
    exception it is deleted and `file` is unchanged."""
    partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_private(folder: Path) -> None:
    """Creates a run's folder, if absent, for its owner alone: it holds prompts and answers. An existing folder keeps
    its permissions."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def folder_for_sockets(longest: int) -> str:
    """Returns the system's temporary folder, or /tmp if its path has more than `longest` bytes: a socket's has few."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= longest else "/tmp"


def write_whole(file: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Writes `file`, whole or not at all. Text is encoded as UTF-8; `mode` is subject to the umask.

    Raises:
        OSError: it cannot be written; an earlier file is unchanged.
    """
    with replacing(file) as partial:
        partial.unlink(missing_ok=True)  # left by a killed process of the same id, perhaps with another mode
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)


def digest(file: Path) -> str:
    """Returns the file's BLAKE2b digest of 16 bytes, as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def fsync(path: Path) -> None:
    """Returns once a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_secret(file: Path, variable: str, kind: str) -> str:
    """Reads the password or key in a file that the environment variable `variable` names, without its final line break.

    Raises:
        ConfigError: it cannot be read or is empty; the message quotes nothing of it.
    """
    try:
        secret = file.read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{variable} = {str(file)!r}: cannot be read: {reason}") from None
    if not secret:
        raise ConfigError(f"{variable} = {str(file)!r}: the file is empty, expected a {kind}")
    return secret
