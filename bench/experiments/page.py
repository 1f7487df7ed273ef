"""The marked part of a page that an experiment writes, and markdown tables."""

from collections.abc import Sequence
from pathlib import Path

from penstock.schemas.process.files import write_whole


class PageError(ValueError):
    """There is no page, or no place in it for the tables."""


def markers(name: str) -> tuple[str, str]:
    """Returns the lines before and after the part of the page that experiment `name` writes."""
    return f"<!-- {name}: written by `python -m bench.experiments`, not by hand -->", f"<!-- /{name} -->"


def write_part(page: Path, name: str, text: str) -> None:
    """Puts `text` between the experiment's markers, whole or not at all.

    Raises:
        PageError: no such page, or not one of each marker, in order.
    """
    begin, end = markers(name)
    try:
        before = page.read_text()
    except FileNotFoundError:
        raise PageError(f"{page}: no such file") from None
    if before.count(begin) != 1 or before.count(end) != 1 or before.index(begin) > before.index(end):
        raise PageError(f"{page}: expected one {begin} and after it one {end}")
    write_whole(page, f"{before.partition(begin)[0]}{begin}\n\n{text}\n{end}{before.partition(end)[2]}")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows of cells as a markdown table, the first as its head."""
    title, *body = rows
    return "".join(f"| {' | '.join(line)} |\n" for line in [title, ["---"] * len(title), *body])
