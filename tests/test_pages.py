"""The pages of the documentation: links resolve, and what they name, quote and show as code exists and works."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CycloptsError, MissingArgumentError

from docs import configuration
from penstock.deploy.cli import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("deploy/recipes/*/README.md")]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def tree_of(file: Path) -> ast.Module:
    return ast.parse(text_of(file))


def links(page: Path) -> list[tuple[str, str]]:
    """Returns file and anchor of every link of a page into the repository."""
    without_code = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    found = re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", without_code)
    return [(file, anchor) for file, anchor in found if "://" not in file]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def blocks(page: Path, language: str) -> list[str]:
    """Returns the page's fenced blocks of one language; "" selects those without a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.M | re.S)
    return [block for named, block in found if named == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert [file for file, _ in links(page) if not (page.parent / file).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names what is no more
    folders = "schemas|producers|consumers|deploy|bench|tests|docs"
    named = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*[\w/])", text_of(page))
    assert [path for path in named if not any(ROOT.glob(f"{path.removesuffix('/')}*"))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_anchor_that_a_page_links_to_is_a_heading(page: Path) -> None:
    targets = [(page.parent / file if file else page, anchor) for file, anchor in links(page) if anchor]
    assert [(file.name, anchor) for file, anchor in targets if anchor not in anchors(file)] == []


def test_the_index_names_every_page() -> None:
    named = {file for file, _ in links(DOCS / "README.md")}
    pages = (page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
    assert [page for page in pages if page not in {*named, "README.md"}] == []


def test_the_configuration_page_is_what_its_program_writes() -> None:
    assert text_of(configuration.PAGE) == configuration.page(), "run `python docs/configuration.py`"


def test_every_field_of_a_run_file_has_a_row_and_a_help_text() -> None:
    rows = [line.split(" | ") for line in configuration.page().splitlines() if line.startswith("| `")]
    assert len(rows) > 90
    assert [row[0] for row in rows if not row[-1].strip(" |")] == []


FREE_TABLES = ("advantage.kwargs.", "environment.kwargs.", "reward.kwargs.", "objective.kwargs.", "engine.args.")
FILES = ("json", "jsonl", "log", "md", "png", "py", "safetensors", "svg", "toml", "yaml", "yml")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_field_of_a_run_file_that_a_page_names_is_there(page: Path) -> None:
    fields = set(re.findall(r"^\| `([\w.]+)`", configuration.page(), re.M))
    sections = {field.rpartition(".")[0] for field in fields if "." in field}
    text = text_of(page)
    if page.name == "coming-from.md":  # the last column is Penstock's
        text = "\n".join(line.split(" | ")[-1] for line in text.splitlines())
    named = re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?: = [^`]*)?`", text)
    missing = [
        name
        for name in named
        if name.partition(".")[0] in sections and name not in fields | sections and not name.startswith(FREE_TABLES)
    ]
    assert [name for name in missing if name.rpartition(".")[2] not in FILES] == []


def test_the_page_of_commands_has_every_make_target() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", text_of(ROOT / "Makefile"), re.M))
    assert set(re.findall(r"`make ([a-z-]+)`", text_of(DOCS / "commands.md"))) == targets - {
        "venv",
        "venv-dev",
        "venv-peers",
    }


def commands(page: Path) -> Iterator[str]:
    """Returns the arguments of every `penstock` command that a page shows, in a block or inline."""
    text = text_of(page).replace("\\\n", " ")
    shown = re.findall(r"`(penstock [a-z][^`\n]*)`", text)
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        shown += block.splitlines()
    for line in shown:
        if found := re.search(r"(?:^|^\$ |--rm |-- )penstock ([a-z][^#|]*)", line):
            yield found[1].replace("INDEX", "7").strip().removesuffix("...").strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_penstock_command_of_a_page_is_one_that_is_taken(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names what is no more
    refused = []
    for shown in commands(page):
        try:
            app.parse_args(shlex.split(shown), exit_on_error=False, print_error=False)
        except MissingArgumentError:
            pass
        except CycloptsError as error:
            refused.append((shown, str(error)))
    assert refused == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_make_target_that_a_page_runs_is_there(page: Path) -> None:
    text = text_of(page)
    modules = set(re.findall(r"python -m ([\w.]+)", text)) - {"pip", "pytest", "ruff", "venv"}
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    targets = re.findall(r"`make ([a-z-]+)[^`]*`", text)
    assert [target for target in targets if not re.search(rf"^{target}:", text_of(ROOT / "Makefile"), re.M)] == []


def test_each_named_failure_has_tests_that_are_there() -> None:
    rows = [
        line for line in text_of(ROOT / "CONTRIBUTING.md").splitlines() if line.startswith("| ") and "::test_" in line
    ]
    assert len(rows) == 16
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", "\n".join(rows))
    assert len(named) == "\n".join(rows).count("::")
    assert [f"{file}::{name}" for file, name in named if name not in defined(tree_of(ROOT / file))] == []


def defined(tree: ast.Module) -> set[str]:
    """Returns functions and classes of a module, and the methods of its classes as `Class.method`."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_what_a_reader_of_the_architecture_is_sent_to_is_there() -> None:
    """The numbered way of a prompt to its gradient has at most 20 files; each row names what to read in its file."""
    rows = re.findall(
        r"^\| (?:(\d+) \| )?\[[^\]]*\]\(\.\./([\w/]+\.py)\) \| ([^|]*) \|", text_of(DOCS / "architecture.md"), re.M
    )
    numbers = [int(number) for number, _, _ in rows if number]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 10 <= len(numbers) <= 20 < len(rows)
    named = [(file, name) for _, file, read in rows for name in re.findall(r"`([\w.]+)`", read)]
    assert {file for file, _ in named} == {file for _, file, _ in rows}
    assert [(file, name) for file, name in named if name not in defined(tree_of(ROOT / file))] == []


def test_a_word_in_brackets_behind_a_folder_of_the_architecture_is_a_module_in_it() -> None:
    places = re.findall(r"`([\w/]+)/` \(([\w, ]+)\)", text_of(DOCS / "architecture.md"))
    modules = [f"{folder}/{word}.py" for folder, words in places for word in words.split(", ")]
    assert len(modules) >= 8
    assert [module for module in modules if not (ROOT / module).is_file()] == []


def test_every_folder_of_the_house_is_on_the_page_of_the_architecture() -> None:
    page = text_of(DOCS / "architecture.md")
    rooms = ("schemas", "producers", "consumers", "deploy")
    wings = [file.parent.relative_to(ROOT) for room in rooms for file in (ROOT / room).glob("*/**/__init__.py")]
    assert [wing.as_posix() for wing in wings if f"`{wing.as_posix()}/`" not in page] == []
    picture = text_of(DOCS / "architecture.svg")
    assert [wing.as_posix() for wing in wings if f">{wing.relative_to(wing.parts[0])}<" not in picture] == []


HOLE = ".*?"


def template(node: ast.expr) -> str | None:
    """Converts a string of the source to a regular expression; placeholders match anything."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = re.split(r"%(?:\.\d+)?[sdgfr]", node.value)
    elif isinstance(node, ast.JoinedStr):
        parts = "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values).split("\0")
    else:
        return None
    return HOLE.join(map(re.escape, parts)) if len("".join(parts)) >= 12 else None


def messages() -> Iterator[str]:
    """Yields the messages that the code can print, as regular expressions."""
    for room in ("schemas", "producers", "consumers", "deploy"):
        for file in (ROOT / room).rglob("*.py"):
            nodes = ast.walk(tree_of(file))
            yield from filter(None, (template(node) for node in nodes if isinstance(node, ast.expr)))
    for text in re.findall(r'fail "(.*)"$', text_of(ROOT / "deploy" / "install.sh"), re.M):
        parts = re.split(r'\$\("[^)]*\)|\$\{?\w+\}?', text)
        yield "install: " + HOLE.join(map(re.escape, parts))


def test_every_message_of_the_troubleshooting_page_is_one_that_the_code_prints() -> None:
    quoted = [line for block in blocks(DOCS / "troubleshooting.md", "") for line in block.splitlines()]
    assert len(quoted) > 20
    known = [re.compile(message) for message in messages()]
    # The command's name and the run file's are put before a message in one place each.
    prefixes = ("", "penstock: ", "penstock: run.toml: ")
    forms = {line: [line.removeprefix(prefix) for prefix in prefixes] for line in quoted}
    assert [line for line, said in forms.items() if not any(m.fullmatch(form) for m in known for form in said)] == []
