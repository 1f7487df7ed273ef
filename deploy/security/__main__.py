"""`python -m penstock.deploy.security RUN...`: the ACL file of a Redis that runs share, a password file per user."""

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.deploy.security.acl import acl_file, user_names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.deploy.security", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="name of a run")
    parser.add_argument(
        "--passwords",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="one file for each user; a missing one is made (mode 0600) with a random password",
    )
    arguments = parser.parse_args(argv)
    try:
        passwords = {name: read_or_make(arguments.passwords / name) for name in user_names(arguments.runs)}
        print(acl_file(arguments.runs, passwords), end="")
    except (OSError, ValueError) as error:
        print(f"penstock.deploy.security: {error}", file=sys.stderr)
        return 2
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
