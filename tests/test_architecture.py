"""The house rules on imports, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "schemas": {"schemas"},
    "producers": {"producers", "schemas"},
    "consumers": {"consumers", "schemas"},
    "deploy": {"deploy", "producers", "consumers", "schemas"},
}
VLLM_FILES = {f"producers/engines/{name}.py" for name in ("vllm", "weight_transfer", "stale_kv", "answer_parser")}
WIRE_ROOM_ALLOWS = {"msgspec", "schemas"} | set(sys.stdlib_module_names)
FILES = sorted(file for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, with its full dotted name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name)
def test_imports_cross_rooms_in_one_direction_only(file):
    allowed = MAY_IMPORT[file.relative_to(ROOT).parts[0]]
    rooms = {module.partition(".")[0] for module in imports(file)} & set(MAY_IMPORT)
    assert rooms <= allowed, f"{name(file)} imports {sorted(rooms - allowed)}"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_nothing_imports_the_tests(file):
    assert "tests" not in {module.partition(".")[0] for module in imports(file)}


@pytest.mark.parametrize("file", FILES, ids=name)
def test_vllm_is_imported_in_two_files_only(file):
    if "vllm" in {module.partition(".")[0] for module in imports(file)}:
        assert name(file) in VLLM_FILES


@pytest.mark.parametrize("file", sorted((ROOT / "schemas").rglob("*.py")), ids=name)
def test_the_contract_needs_the_standard_library_and_msgspec_only(file):
    foreign = {module.partition(".")[0] for module in imports(file)} - WIRE_ROOM_ALLOWS
    assert not foreign, f"{name(file)} imports {sorted(foreign)}"


@pytest.mark.parametrize("room", ["producers", "consumers"])
def test_parts_do_not_import_the_loop_or_the_entry_point(room):
    """Inside a room: `__main__` -> loop -> parts. Only `__main__` may be imported by nobody."""
    for file in (ROOT / room).rglob("*.py"):
        assert f"{room}.__main__" not in set(imports(file)), f"{name(file)} imports {room}.__main__"


def test_there_is_no_utils_module():
    assert not [name(file) for file in FILES if file.stem in ("utils", "util", "helpers", "common")]


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def run_without(modules: str, program: str) -> None:
    """Runs a program in an interpreter in which the named packages cannot be imported."""
    blocker = (
        "import sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {modules.split()!r}:\n"
        "            raise ImportError(f'{name} is blocked')\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    shown = subprocess.run([sys.executable, "-c", blocker + program], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr


def test_the_contract_imports_without_torch_vllm_numpy_and_redis():
    modules = [f"schemas.{file.stem}" for file in sorted((ROOT / "schemas").glob("*.py")) if file.stem != "__init__"]
    run_without("torch vllm numpy redis transformers", f"import {', '.join(modules)}")


def test_the_trainer_and_the_launcher_import_without_vllm():
    run_without("vllm", "import consumers.__main__, deploy.cli, deploy.launcher, producers.__main__")
