"""Prints tables and blocks of text on standard output, control characters escaped."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.deploy.launch.command_line import standard_output

T = TypeVar("T")
Columns = dict[str, Callable[[T], str]]
"""A table's columns: the cell of an item, by heading."""


def print_table(table: Table, at_most: int | None = None) -> None:
    """Prints a table to standard output: on a terminal `at_most` columns wide, elsewhere without the spaces that pad
    its lines."""
    console = standard_output()
    if console.is_terminal:
        console.print(table, width=min(at_most or console.width, console.width))
        return
    with console.capture() as printed:
        console.print(table)
    print("\n".join(map(str.rstrip, printed.get().splitlines())))


def print_columns(columns: Columns[T], items: Sequence[T]) -> None:
    """Prints a row for each item; nothing without one."""
    if items:
        print_rows(columns, ([cell(item) for cell in columns.values()] for item in items))


def print_rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Prints a table, its cells escaped."""
    table = _bare_table()
    for number, column in enumerate(header):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(escape(safe(cell)) for cell in row))
    print_table(table)


def print_counts(rows: Iterable[tuple[str, int | None, str]]) -> None:
    """Prints a table of a label, a count (`unknown` if it is None) and a remark."""
    table = _bare_table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for label, count, remark in rows:
        table.add_row(label, "unknown" if count is None else f"{count:,}", escape(remark))
    print_table(table)


def _bare_table(*, show_header: bool = True) -> Table:
    return Table(box=box.SIMPLE_HEAD, show_header=show_header, pad_edge=False, padding=(0, 1, 0, 0))


def print_block(label: str, text: str) -> None:
    """Prints a text of several lines; nothing if it is empty."""
    for number, line in enumerate(text.expandtabs(4).splitlines()):
        print(f"{'' if number else label:8} {safe(line)}")


def moment(time_s: float) -> str:
    """Returns local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OverflowError, OSError):  # an entry id may be any number of 64 bits
        return f"{time_s:.0f} s"


def safe(text: str) -> str:
    """Returns the text with every unprintable character escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
