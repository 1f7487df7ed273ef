"""The rules on imports and names, checked in the source."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "schemas": {"schemas"},
    "producers": {"producers", "schemas"},
    "consumers": {"consumers", "schemas"},
    "deploy": {"deploy", "producers", "consumers", "schemas"},
}
VLLM_FILES = {
    f"producers/engines/{name}.py"
    for name in (
        "vllm",
        "engine_process",
        "weight_transfer",
        "cpu_build",
        "update",
        "adapter_products",
        "answer_parser",
        "direct_writes",
        "routes",
    )
}
CONTRACT_ALLOWS = {"msgspec"} | set(sys.stdlib_module_names)
BESIDE_IT = {
    "process": {"PIL", "prometheus_client", "redis"},
    "weights": {"fsspec", "numpy", "redis", "xxhash", "zstandard"},
}
"""What wings of the contract import in addition."""
FILES = sorted(file for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py"))
ROOF = ROOT / "deploy" / "roof" / "__init__.py"
"""The package `penstock` itself."""
LABORATORY = sorted(file for folder in ("bench", "docs") for file in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SUPPORT = [
    file
    for file in TESTS
    if file.relative_to(ROOT).parts[1] in ("doubles", "chaos") and not file.name.startswith("test_")
]
WINGS = sorted(file for file in FILES if file.name == "__init__.py")


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def module(file: Path) -> str:
    """Returns the name under which a file is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(("penstock", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module(file): file for file in FILES}


@functools.cache
def imports(file: Path) -> frozenset[str]:
    """Returns the full dotted names of all modules that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            base = node.module or ""
            found |= {full if (full := f"{base}.{alias.name}") in MODULES else base for alias in node.names}
    return frozenset(found)


def rooms(file: Path) -> set[str]:
    """Returns the rooms that a file imports from."""
    return {imported.split(".")[1] for imported in imports(file) if imported.startswith("penstock.")}


def packages(file: Path) -> set[str]:
    """Returns the top-level packages that a file imports from."""
    return {imported.partition(".")[0] for imported in imports(file)}


def offenders(files: Iterable[Path], forbidden: Callable[[Path], set[str]]) -> dict[str, list[str]]:
    """Returns the imports that break a rule, by file; empty if every file keeps it."""
    return {name(file): sorted(found) for file in files if (found := forbidden(file))}


def test_imports_cross_rooms_in_one_direction_only():
    assert offenders(FILES, lambda file: rooms(file) - MAY_IMPORT[file.relative_to(ROOT).parts[0]]) == {}


def test_the_house_is_imported_under_one_roof():
    """A flat import would work from the root, make each class exist twice, and find a user's own `deploy/` or
    `schemas/`."""
    assert offenders([*FILES, *LABORATORY, *TESTS], lambda file: packages(file) & set(MAY_IMPORT)) == {}


def test_the_roof_imports_from_above_and_nothing_when_it_is_imported():
    """Every `import penstock.schemas` imports the roof first."""
    assert rooms(ROOF) <= {"deploy", "schemas"}
    program = (
        f"import runpy, sys; runpy.run_path({str(ROOF)!r}); print([m for m in sys.modules if m[:8] == 'penstock'])"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout == "[]\n", shown.stderr


def test_nothing_imports_the_tests_or_the_laboratory():
    assert offenders(FILES, lambda file: packages(file) & {"tests", "bench", "docs"}) == {}


def test_vllm_is_imported_in_the_engines_only():
    assert offenders(FILES, lambda file: packages(file) & {"vllm"}).keys() <= VLLM_FILES


def test_the_contract_needs_the_standard_library_and_msgspec_only():
    def foreign(file: Path) -> set[str]:
        return packages(file) - {"penstock"} - CONTRACT_ALLOWS - BESIDE_IT.get(file.parent.name, set())

    assert offenders((ROOT / "schemas").rglob("*.py"), foreign) == {}


def test_numerics_never_see_the_stream():
    def others(file: Path) -> set[str]:
        own, learning = "penstock.consumers.", "penstock.consumers.learning"
        return {each for each in imports(file) if each.startswith(own) and not each.startswith(learning)}

    assert offenders((ROOT / "consumers" / "learning").rglob("*.py"), others) == {}


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in sorted(edges.get(node, ())):
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def test_no_modules_import_each_other_in_a_circle():
    edges = {own: {other for other in imports(file) if other in MODULES} for own, file in MODULES.items()}
    assert cycles(edges) == []


def test_no_packages_import_each_other_in_a_circle():
    """A package is a folder's own files, without those of the folders in it."""
    edges = defaultdict(set)
    for file in FILES:
        own = file.parent
        edges[name(own)] |= {name(MODULES[other].parent) for other in imports(file) if other in MODULES} - {name(own)}
    assert cycles(edges) == []


@pytest.mark.parametrize("room", ["producers", "consumers"])
def test_parts_do_not_import_the_loop_or_the_entry_point(room):
    """Inside a room: `__main__` -> loop -> parts. Only `__main__` may be imported by nobody."""
    for file in (ROOT / room).rglob("*.py"):
        entry = f"penstock.{room}.__main__"
        assert entry not in set(imports(file)), f"{name(file)} imports {entry}"


def docstring(init: Path) -> str:
    return ast.get_docstring(ast.parse(init.read_text())) or ""


def quoted_names(init: Path) -> set[str]:
    """Returns the dotted names in backticks in the docstring of a package."""
    return set(re.findall(r"`(\w+(?:\.\w+)*)`", docstring(init)))


@functools.cache
def imported_from_outside() -> dict[Path, set[str]]:
    """Returns the modules of each package that files of other folders import, its sub-packages' files included."""
    found = defaultdict(set)
    for file in FILES:
        for other in imports(file) & MODULES.keys():
            module_file = MODULES[other]
            if module_file.parent != file.parent and module_file.name != "__init__.py":
                found[module_file.parent].add(module_file.stem)
    return found


@pytest.mark.parametrize("init", WINGS, ids=name)
def test_a_wing_is_imported_through_what_its_docstring_names(init):
    named = {quoted.partition(".")[0] for quoted in quoted_names(init)}
    assert imported_from_outside()[init.parent] - named == set()


def top_level_names(file: Path) -> set[str]:
    """Returns the classes, functions and constants that a module defines."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("init", WINGS, ids=name)
def test_the_docstring_of_a_wing_names_classes_that_exist(init):
    """A class is written `module.Name`, with a capital; `room.wing` and the `section.field` of a run file are not."""
    missing = []
    for quoted in quoted_names(init):
        owner, _, member = quoted.rpartition(".")
        file = init.parent / f"{owner.replace('.', '/')}.py"
        if member[:1].isupper() and owner and (not file.exists() or member not in top_level_names(file)):
            missing.append(quoted)
    assert missing == []


@pytest.mark.parametrize("init", WINGS, ids=name)
def test_a_wing_says_what_it_is_for(init):
    text = docstring(init)
    assert len(text.split()) >= 5 and "." in text
    assert "TODO" not in init.read_text()


def test_a_public_class_name_means_one_thing():
    places = defaultdict(list)
    for file in [*FILES, *LABORATORY, *TESTS]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name(file))
    assert {found: files for found, files in places.items() if len(files) > 1} == {}


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    """A docstring says what the thing is or does: "The cost of a row"; "Of a row" is incomplete without the name."""
    defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    places = [
        f"{name(file)}:{node.lineno}"
        for file in [*FILES, *LABORATORY, *TESTS]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, defined) and (ast.get_docstring(node) or "").startswith("Of ")
    ]
    assert places == []


BUDGET = {
    "schemas": 6_760,
    "producers": 17_940,
    "consumers": 20_800,
    "deploy": 15_500,
    "bench": 7_000,
    "tests": 59_800,
}
"""The most lines of Python in each folder. A commit that goes beyond raises the number here and says what went out for
it."""
MOST_IMPORTED_BY_THE_TRAINER = 127


def test_the_house_keeps_its_budget():
    lines = {
        folder: sum(len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")) for folder in BUDGET
    }
    assert {folder: number for folder, number in lines.items() if number > BUDGET[folder]} == {}
    slack = {folder: number for folder, number in lines.items() if number < 0.97 * BUDGET[folder]}
    assert slack == {}, "what has become lighter stays so: lower the number"


def test_the_trainer_stands_on_few_files():
    """Its own modules, with those that they import anywhere."""
    reached, waiting = set(), ["penstock.consumers.trainer"]
    while waiting:
        each = waiting.pop()
        if each not in reached and MODULES[each].name != "__init__.py":
            reached.add(each)
            waiting += imports(MODULES[each]) & MODULES.keys()
    assert len(reached) <= MOST_IMPORTED_BY_THE_TRAINER


def test_the_trainer_stays_readable_in_one_go():
    tree = ast.parse((ROOT / "consumers" / "trainer.py").read_text())
    (trainer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    assert (trainer.end_lineno or 0) - trainer.lineno + 1 <= 260


def text_in_the_locales_encoding(file: Path) -> set[str]:
    """Returns the calls that read or write text without saying UTF-8, each with its line."""
    calls = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]
    found = set()
    for call in calls:
        function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        names = {keyword.arg for keyword in call.keywords}
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        constants = {value.value for value in values if isinstance(value, ast.Constant)}
        # A mode, if it says text. Without one only `open(file)` and `file.open()` of a path would be text.
        modes = [
            mode for mode in constants if isinstance(mode, str) and re.fullmatch("[rwax]t?[+]?|[+]?t?[rwax]", mode)
        ]
        is_piped = function in ("run", "Popen", "check_output") and {"text", "universal_newlines"} & names
        opens_text = function in ("open", "fdopen", "NamedTemporaryFile", "TextIOWrapper") and modes
        is_open = isinstance(call.func, ast.Name) and function == "open" and len(values) == 1
        is_file = function in ("read_text", "write_text") or opens_text or is_open
        if (is_file or is_piped) and "encoding" not in names and not {"utf-8", "utf-8-sig"} & constants:
            found.add(f"{function} in line {call.lineno}")
    return found


def test_text_is_utf_8_whatever_the_locale():
    """In Latin-1 a run file's `Réponds` would silently become two letters each, in C it could not be read."""
    assert offenders([*FILES, *LABORATORY], text_in_the_locales_encoding) == {}


def test_no_module_is_named_after_nothing_or_like_a_test():
    assert not [name(file) for file in FILES if file.stem in ("utils", "util", "helpers", "common")]
    sources = [*FILES, *LABORATORY, *SUPPORT]
    assert not [name(file) for file in sources if file.stem.startswith("test_") or file.stem.endswith("_test")]


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
    modules = [module(file) for file in sorted((ROOT / "schemas").glob("*.py"))]
    run_without("torch vllm numpy redis transformers", f"import {', '.join(modules)}")


def test_the_trainer_and_the_launcher_import_without_vllm():
    modules = ("consumers.__main__", "deploy.cli", "deploy.launch.launcher", "producers.__main__")
    run_without("vllm", f"import {', '.join(f'penstock.{each}' for each in modules)}")
