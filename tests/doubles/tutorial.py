"""Reads the pages of docs/tutorials as programs."""

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"


def blocks(page: str, language: str = "python") -> list[str]:
    """Returns the fenced blocks of one language, in order; "" selects those without a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
    return [block for named, block in found if named == language]


def save_modules(page: str, folder: Path) -> None:
    """Writes the Python blocks that begin with a file name to that file."""
    for block in blocks(page):
        if named := re.match(r"# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block, encoding="utf-8")


def cells(page: str, run: str) -> list[str]:
    """Returns the other Python blocks, with the name of the page's run replaced by `run`."""
    own = [block for block in blocks(page) if not re.match(r"# \w+\.py\n", block)]
    return [block.replace('"first"', repr(run)) for block in own]


def play(programs: list[str]) -> dict[str, Any]:
    """Executes the cells of a notebook; returns the names that they define."""
    names: dict[str, Any] = {}
    for program in programs:
        exec(program, names)
    return names
