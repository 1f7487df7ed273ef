"""Prints the requirements that this environment does not satisfy, one per line. Needs pip only.

The requirements are those of pyproject.toml for the project and the extras given, or those of one requirements file.
"""

import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    # A new environment has only pip. Its import changes how distutils is found, so it is the second choice.
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]


def missing_requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Returns the direct requirements of the project and of `extras` that no installed version satisfies.

    Only direct ones: the engine's CPU build requires packages that are removed after its installation.
    """
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return _missing(wanted)


def missing_from_file(file: Path) -> list[str]:
    """Returns the same for a requirements file: requirements and comments, one per line."""
    lines = (line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines())
    return _missing([line for line in lines if line])


def _missing(wanted: list[str]) -> list[str]:
    return [text for text in dict.fromkeys(wanted) if not _is_satisfied(Requirement(text))]


def _is_satisfied(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    if sys.argv[1].endswith(".txt"):
        print("\n".join(missing_from_file(Path(sys.argv[1]))))
    else:
        print("\n".join(missing_requirements(Path(__file__).parents[1] / "pyproject.toml", sys.argv[1:])))
