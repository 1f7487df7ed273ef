"""The package as users get it: a wheel with the rooms, without bench, tests and docs."""

import ast
import functools
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import penstock

ROOT = Path(__file__).parents[1]
ROOMS = ("schemas", "producers", "consumers", "deploy")
ROOF = Path("deploy") / "roof"  # the folder of `penstock` itself
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
DEVELOPMENT = Path("deploy") / "grafana"  # makes the dashboards, with a library that users do not install
INSTALLER = Path("deploy") / "missing_requirements.py"  # runs before anything is installed; pip has what it imports
TAKEN_NAME = "raise ImportError('a folder of the user was taken for a part of Penstock')\n"
pytestmark = [pytest.mark.xdist_group("packaging"), pytest.mark.timeout(900)]


def python_files() -> list[Path]:
    files = [file.relative_to(ROOT) for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    return [file for file in files if not file.is_relative_to(DEVELOPMENT)]


OWN_FILES = ("__init__.py", "py.typed")


def packaged(folder: Path) -> tuple[str, ...]:
    """Returns the place of a repository folder in the package."""
    return ("penstock", *(folder.relative_to(ROOF) if folder.is_relative_to(ROOF) else folder).parts)


def test_every_folder_with_modules_is_a_package_of_the_list():
    folders = {file.parent for file in python_files()}
    assert set(SETUPTOOLS["packages"]) == {".".join(packaged(folder)) for folder in folders}
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_pattern_of_the_package_data_matches_a_file():
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT / (ROOF if package == "penstock" else package.removeprefix("penstock.").replace(".", "/"))
        assert [pattern for pattern in patterns if not list(folder.glob(pattern))] == [], package


def distributions(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


CORE = distributions(PYPROJECT["project"]["dependencies"])
EXTRAS = {name: distributions(texts) for name, texts in PYPROJECT["project"]["optional-dependencies"].items()}
OPTIONAL = set().union(*(names for extra, names in EXTRAS.items() if extra != "dev")) - CORE
"""Distributions that a user need not install."""
PEERS = distributions(
    line for line in (ROOT / "bench" / "peers-requirements.txt").read_text().splitlines() if not line.startswith("#")
)
OWN = {"penstock", "bench", "tests", "docs", *(file.stem for file in (ROOT / "tests" / "doubles").iterdir())}


@functools.cache
def providers() -> dict[str, set[str]]:
    """Returns the installed distributions by the name under which they are imported."""
    return {name: {canonicalize_name(each) for each in found} for name, found in packages_distributions().items()}


def third_party_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        yield from {name.partition(".")[0] for name in names} - OWN - sys.stdlib_module_names


def undeclared(files: Iterable[Path], declared: set[str]) -> dict[str, set[str]]:
    """Returns the files that import a name without a requirement, by that name; a package that is not installed counts
    under its own name."""
    found: dict[str, set[str]] = {}
    for file in files:
        for name in third_party_imports(file):
            if not declared & (providers().get(name, set()) | {canonicalize_name(name)}):
                found.setdefault(name, set()).add(file.as_posix())
    return found


def test_every_import_of_the_house_is_a_dependency_or_in_an_extra_for_users():
    assert undeclared([file for file in python_files() if file != INSTALLER], CORE | OPTIONAL) == {}


def test_every_import_of_the_laboratory_and_the_tests_is_declared():
    folders = (ROOT / "bench", ROOT / "docs", ROOT / "tests", ROOT / DEVELOPMENT)
    files = [file.relative_to(ROOT) for folder in folders for file in folder.rglob("*.py")]
    assert undeclared(files, CORE | PEERS | set().union(*EXTRAS.values())) == {}


def test_extras_of_one_distribution_ask_for_one_version():
    pinned: dict[str, set[str]] = {}
    for required in map(Requirement, chain(*PYPROJECT["project"]["optional-dependencies"].values())):
        if str(required.specifier).startswith("=="):
            pinned.setdefault(canonicalize_name(required.name), set()).add(str(required.specifier))
    assert {name: found for name, found in pinned.items() if len(found) > 1} == {}


def test_commands_start_without_what_only_an_extra_installs():
    names = sorted(name for name, found in providers().items() if found & OPTIONAL and not found & CORE)
    modules = ("deploy.cli", "deploy.record.reading", "consumers.__main__", "producers.__main__")
    program = f"import sys; sys.modules |= dict.fromkeys({names!r})\n"
    program += "\n".join(f"import penstock.{module}" for module in modules)
    shown = run_in(ROOT, sys.executable, "-c", program)
    assert shown.returncode == 0, shown.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources without files of an earlier build."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for room in (*ROOMS, "bench", "docs"):
        shutil.copytree(ROOT / room, source / room, ignore=ignored, symlinks=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", out]
    subprocess.run([*command, source], check=True, timeout=280)
    (built,) = out.iterdir()
    return built


def test_the_wheel_holds_the_house_and_nothing_of_the_laboratory(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"penstock"}
    assert {name.split("/")[1] for name in names if name.startswith("penstock/")} == {*ROOMS, *OWN_FILES}
    modules = {"/".join((*packaged(file.parent), file.name)) for file in python_files()}
    assert {name for name in names if name.endswith(".py")} == modules
    data = {f"penstock/deploy/runs/{file.name}" for file in (ROOT / "deploy" / "runs").glob("*.toml")}
    assert data <= names


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an empty environment with the wheel installed; the requirements come from this environment, without
    Penstock."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", "--quiet"]
    subprocess.run([*command, wheel], check=True, timeout=280)
    # Paths of a .pth file are searched without their own .pth files: an editable Penstock there stays unknown.
    (packages / "requirements.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "bin"


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """A user's project whose folders have the names of Penstock's rooms."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(TAKEN_NAME)
    return tmp_path


def run_in(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)


def test_the_installed_command_runs_among_folders_of_its_rooms_names(installed: Path, users_folder: Path):
    (users_folder / "model").mkdir()
    (users_folder / "model" / "config.json").write_text("{}")
    shown = run_in(users_folder, installed / "penstock", "--help")
    assert shown.returncode == 0 and "run" in shown.stdout, shown.stderr
    dry = ("run", "demo", "--dry-run", "--set", "model.path=model")
    for command in ([installed / "penstock"], [installed / "python", "-m", "penstock.deploy.cli"]):
        shown = run_in(users_folder, *command, *dry)
        assert shown.returncode == 0, shown.stderr
        assert tomllib.loads(shown.stdout)["name"] == "demo"


def test_the_editable_install_runs_among_folders_of_its_rooms_names(users_folder: Path):
    shown = run_in(users_folder, sys.executable, "-m", "penstock.deploy.cli", "--help")
    assert shown.returncode == 0, shown.stderr


FUNCTIONS = "import penstock, penstock.schemas; print(*[getattr(penstock, name).__module__ for name in dir(penstock)])"


def test_the_functions_are_imported_from_the_package_itself(installed: Path, users_folder: Path):
    shown = run_in(users_folder, installed / "python", "-c", FUNCTIONS)
    assert shown.returncode == 0, shown.stderr
    assert "penstock.deploy.running" in shown.stdout.split()


def test_a_type_checker_sees_each_function_where_it_is():
    (typed,) = (node for node in ast.parse((ROOT / ROOF / "__init__.py").read_text()).body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: vars(penstock)["_MODULES"][name] for name in dir(penstock)}


def test_the_package_says_that_it_is_typed(installed: Path):
    """Every part of a package with this file is typed (PEP 561)."""
    program = "import importlib.resources as r; print((r.files('penstock') / 'py.typed').is_file())"
    shown = run_in(installed, installed / "python", "-c", program)
    assert shown.stdout == "True\n", shown.stderr
