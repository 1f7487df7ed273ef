"""`python -m bench.compose_check [build|run]`: build the images, or bring them up and check; by default both."""

import argparse
import sys
from pathlib import Path

from bench.compose_check.check import Check, CheckError, workspace
from bench.compose_check.images import build_all
from bench.compose_check.podman import CommandError, Podman


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.compose_check", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("build", "run"))
    what = parser.parse_args().what
    try:
        if what != "run":
            build_all(Podman({}))
        if what != "build":
            _run()
    except (CommandError, CheckError) as error:
        print(f"compose-check: {error}", file=sys.stderr)
        return 1
    return 0


def _run() -> None:
    with workspace() as folder:
        check = Check(Path(folder))
        try:
            check.run()
        except (CommandError, CheckError):
            check.tell()
            raise
        finally:
            for problem in (problems := check.stop()):
                print(f"compose-check: cannot clean up: {problem}", file=sys.stderr)
        if problems:
            raise CheckError(f"passed, but {len(problems)} things could not be removed")


if __name__ == "__main__":
    sys.exit(main())
