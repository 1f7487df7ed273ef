"""`python -m penstock.deploy.images.hand_out RUN`: makes the passwords of a run once and gives each part its own.

Every part mounts one folder of `--to`, and so sees only its own password:

    redis/users.acl                               hashes of all, see docs/security.md
    producer/, trainer/, observer/, operator/     username, password
    observer/exporter.json                        the observer's password again, in redis_exporter's format
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.deploy.security.acl import ROLES, acl_file, password_in, user_name, user_names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.deploy.images.hand_out", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument(
        "--passwords",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="one file for each user, made if it is missing",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="holds a folder for each part")
    parser.add_argument("--redis", required=True, metavar="HOST:PORT", help="where redis_exporter finds Redis")
    arguments = parser.parse_args(argv)
    try:
        hand_out(arguments.run, arguments.passwords, arguments.to, arguments.redis)
    except (OSError, ValueError) as error:
        print(f"penstock.deploy.images.hand_out: {error}", file=sys.stderr)
        return 2
    return 0


def hand_out(run: str, passwords: Path, to: Path, redis: str) -> None:
    """Writes the files named above.

    Raises:
        OSError: a folder cannot be made or written.
        ValueError: not a run name, or an empty password file.
    """
    found = {name: password_in(passwords / name) for name in user_names([run])}
    _write(to / "redis" / "users.acl", acl_file([run], found), 0o644)  # hashes; Redis runs as another user
    for part in ROLES:
        _write(to / part / "username", user_name(run, part), 0o444)
        _write(to / part / "password", found[user_name(run, part)], 0o400)
    user = user_name(run, "observer")
    by_address = {f"redis://{where}": found[user] for where in (redis, f"{user}@{redis}")}
    _write(to / "observer" / "exporter.json", json.dumps(by_address), 0o400)


def _write(file: Path, text: str, mode: int) -> None:
    """Writes as `penstock.schemas.process.files.write_whole` does, which needs msgspec, absent from this image."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)
    partial.replace(file)


if __name__ == "__main__":
    sys.exit(main())
