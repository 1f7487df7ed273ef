"""Writes docs/configuration.md, every field of a run file, from schemas/config.py: `python docs/configuration.py`."""

import ast
import functools
import inspect
import itertools
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from penstock.schemas import config

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """\
<!-- written by `python docs/configuration.py` from schemas/config.py -->
# Configuration

A run is described by one TOML file, the run file. `penstock run RUN.toml --dry-run` checks it and prints it with every
default written out; `--set PATH=VALUE` overrides a field, as in `--set trainer.learning_rate=1e-5`. An unknown field, a
wrong type and settings that contradict each other are errors before anything starts; the message names the field, its
value and what was expected.

The [README](../README.md) has the shortest run file, [coming-from.md](coming-from.md) the names that TRL and verl use.

TOML has no None: where a text below says None, the field is left out. A suffix is a unit: `_s` seconds, `_mb`
megabytes, `_gib` gibibytes, `_tokens` tokens, `_steps` optimizer steps.
"""


class FieldRow(NamedTuple):
    """One row of the page."""

    path: str
    type: str
    default: str
    help: str


@functools.cache
def class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Returns the statements of each class of a module, by its name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def helps(struct: type) -> dict[str, str]:
    """Returns the strings below the fields of a class and of its bases, by field."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base.__module__.startswith("penstock."):
            for field, below in itertools.pairwise(class_bodies(base.__module__)[base.__name__]):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found[field.target.id] = as_markdown(ast.literal_eval(below.value))
    return found


def as_markdown(text: str) -> str:
    """Formats a docstring on one line, with links to the pages that it names."""
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", " ".join(text.split()))


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """Returns the table that a field of type `kind` holds; None for a field that holds a value."""
    kinds = (kind, *get_args(kind))
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, msgspec.Struct)), None)


def shown(kind: Any) -> str:
    """Describes a type in the words of TOML."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return shown(arguments[0]) + bounds(kind.__metadata__[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(shown(each) for each in arguments if each is not type(None))
    if origin is tuple:
        return f"array of {'' if arguments[-1] is Ellipsis else f'{len(arguments)} x '}{shown(arguments[0])}"
    if origin is dict:
        return "table"
    return {str: "string", int: "integer", float: "float", bool: "boolean"}[kind]


def bounds(meta: msgspec.Meta) -> str:
    if meta.gt is not None:
        return f", above {meta.gt}" + ("" if meta.le is None else f", at most {meta.le}")
    if meta.ge is not None:
        below = f", {meta.ge} or more" if meta.le is None else f", {meta.ge} to {meta.le}"
        return below if meta.lt is None else f"{below}, below {meta.lt}"
    return ""


def default_of(field: Any, table: Any) -> str:
    """Formats a field's default. table: the table's own default, which may set a field that has none; None if there is
    no table."""
    if table is not None:
        value = getattr(table, field.name)
    elif field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return "required"
    return "not set" if value is None else f"`{json.dumps(msgspec.to_builtins(value))}`"


def fields(struct: type[msgspec.Struct], prefix: str, table: Any) -> Iterator[FieldRow]:
    """Yields the fields of one table; a table inside it has rows of its own."""
    hints, texts = get_type_hints(struct, include_extras=True), helps(struct)
    for field in msgspec.structs.fields(struct):
        kind = hints[field.name]
        if struct_in(kind) is None:
            yield FieldRow(prefix + field.name, shown(kind), default_of(field, table), texts.get(field.name, ""))


def section(title: str, struct: type[msgspec.Struct], intro: str, prefix: str = "", table: Any = None) -> str:
    rows = [f"| `{one.path}` | {one.type} | {one.default} | {one.help} |" for one in fields(struct, prefix, table)]
    head = [f"## {title}\n", *([f"{intro}\n"] if intro else []), "| field | type | default | |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def tables(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yields a section for each table in `struct`, in the order of its fields, and for the tables in those."""
    hints, texts = get_type_hints(struct, include_extras=True), helps(struct)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    for name, kind in hints.items():
        inner = struct_in(kind)
        if inner is None:
            continue
        path, default = prefix + name, defaults[name]
        about = "" if inner is config.Plug else (inner.__dict__.get("__doc__") or "").split("\n\n")[0]
        optional = "Optional." if type(None) in get_args(kind) else ""
        intro = " ".join(part for part in (optional, as_markdown(about), texts.get(name, "")) if part)
        title = f"[[{path}]]" if get_origin(kind) is tuple else f"[{path}]"
        yield section(title, inner, intro, f"{path}.", default if isinstance(default, inner) else None)
        yield from tables(inner, f"{path}.")


def page() -> str:
    top = section("The run", config.RunConfig, "Fields at the top of the run file, above the first table.")
    return "\n".join([HEAD, top, *tables(config.RunConfig)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
