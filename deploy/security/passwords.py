"""Password files: one for each ACL user."""

import os
import secrets
from pathlib import Path


def read_or_make(file: Path) -> str:
    """Reads the password in `file`, or makes one of 256 bits if there is no such file.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it is empty.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        password = file.read_text().rstrip("\r\n")
        if not password:
            raise ValueError(f"{file}: the file is empty, expected a password") from None
        return password
    password = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(password)
    return password
