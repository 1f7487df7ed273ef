"""`python -m penstock.deploy.security RUN...`: the ACL file of a Redis that runs share, a password file per user."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.deploy.security.acl import acl_file, password_in, user_names


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
        passwords = {name: password_in(arguments.passwords / name) for name in user_names(arguments.runs)}
        print(acl_file(arguments.runs, passwords), end="")
    except (OSError, ValueError) as error:
        print(f"penstock.deploy.security: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
