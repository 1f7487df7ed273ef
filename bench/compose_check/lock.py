"""Prints the packages of an image, one pin a line: all that the project needs with one of its engines, and for weights
in an S3 bucket.

The versions are those of a `pip inspect` (of an environment that is known to work) or of a `pip install --report`:

    .venv/bin/python -m pip inspect \\
        | .venv/bin/python -m bench.compose_check.lock cpu > deploy/images/requirements-cpu.txt
"""

import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MACHINES = ("x86_64", "aarch64")
"""Machines that images are built for."""
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
BUILD = ("setuptools",)
"""Installs the project itself."""
OF_OLDER_PYTHONS = ('async-timeout==5.0.1; python_full_version < "3.11.3"',)
"""A requirement of redis-py on these Pythons (Debian 12's), which this Python's inspection does not show."""


def pins(roots: Iterable[str], packages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns `name==version` of every package that `roots` require, sorted by name, with a marker if only one machine
    needs it.

    To be run on x86_64: what is not installed is left out, and arm needs nothing of its own.

    A package that is needed and not among `packages` (metadata by canonical name) is left out: the engine's CPU build
    names some that its environment must not have (see deploy/install.sh).
    """
    wanted = list(roots)
    needed = {machine: set(_closure(wanted, packages, machine)) for machine in MACHINES}
    return sorted(
        f"{name}=={packages[name]['version']}{_marker([machine for machine in MACHINES if name in needed[machine]])}"
        for name in set().union(*needed.values())
    )


def _marker(machines: list[str]) -> str:
    return "" if len(machines) == len(MACHINES) else f'; platform_machine == "{machines[0]}"'


def _closure(roots: Iterable[str], packages: Mapping[str, Mapping[str, Any]], machine: str) -> Iterator[str]:
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(root), "") for root in roots]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        place = {"extra": extra, "platform_machine": machine}
        if name not in packages or (requirement.marker and not requirement.marker.evaluate(place)):
            continue
        yield name
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                needed = packages[name].get("requires_dist", [])
                waiting += [(Requirement(text), wanted) for text in needed]


def main() -> int:
    extra = sys.argv[1]
    report = json.load(sys.stdin)
    found = report.get("installed") or report["install"]
    packages: dict[str, Any] = {canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in found}
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    roots = [
        *project["dependencies"],
        *(each for name in (extra, "s3") for each in project["optional-dependencies"][name]),
    ]
    roots += BUILD
    print("\n".join(sorted([*OF_OLDER_PYTHONS, *pins(roots, packages)])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
