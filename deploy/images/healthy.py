"""Exits with 0 if this container's process answers at its metrics port."""

import sys
import urllib.request

URL = "http://127.0.0.1:9400/metrics"


def main() -> int:
    try:
        with urllib.request.urlopen(URL, timeout=4) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{URL}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
