"""The pages of docs/tutorials as programs."""

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "tutorials"


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of one language, "" being none, in their order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
    return [block for named, block in found if named == language]


def save_modules(page: str, folder: Path) -> None:
    """Writes the blocks that begin with their file's name."""
    for block in blocks(page):
        if named := re.match(r"# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block, encoding="utf-8")


def cells(page: str, run: str) -> list[str]:
    """The other blocks, about a run of another name than the page's."""
    own = [block for block in blocks(page) if not re.match(r"# \w+\.py\n", block)]
    return [block.replace('"first"', repr(run)) for block in own]


def play(programs: list[str]) -> dict[str, Any]:
    """Executes the cells of a notebook; returns its names."""
    names: dict[str, Any] = {}
    for program in programs:
        exec(program, names)
    return names
