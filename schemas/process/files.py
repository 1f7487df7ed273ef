"""Files that appear whole or not at all: written beside their place, then renamed to it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a path in the folder of `file` to write to. At the end of the block it is renamed to `file`; after an
    exception it is deleted and `file` is as it was."""
    partial = file.with_name(f"{file.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(file: Path, data: str | bytes, *, mode: int = 0o666) -> None:
    """Writes `file`, whole or not at all. Text is encoded as UTF-8; `mode` is subject to the umask.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    with replacing(file) as partial:
        partial.unlink(missing_ok=True)  # left by a killed process of the same id, perhaps with another mode
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
