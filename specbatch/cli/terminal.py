"""Prints Markdown to standard output; on a terminal its tables are drawn, in several parts if they are too wide."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Column = tuple[str, ...]  # heading and cells
WORD = 20  # characters of a word that are not broken
_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")  # the line below the headings
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s?[%x]?|-|")


def print_markdown(text: str) -> None:
    """Print the text as it is or, on a terminal, with drawn tables. A table that cannot fit is printed as it is."""
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    from rich.console import Console

    console = Console()
    for in_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        block = list(lines)
        parts = list(_parts(console, _columns(block))) if in_table else []
        if not parts:
            print("\n".join(block), flush=True)
        for part in parts:
            console.print(part)


def _columns(lines: Sequence[str]) -> list[Column]:
    """The columns of a Markdown table; none if the lines are no table."""
    if len(lines) < 2 or not _RULE.fullmatch(lines[1].strip()):
        return []
    rows = [_cells(line) for index, line in enumerate(lines) if index != 1]
    return list(zip(*rows, strict=True)) if len(set(map(len, rows))) == 1 else []


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _parts(console: Console, columns: list[Column]) -> Iterator[Table]:
    """Tables of some columns each, which fit the terminal. They all begin with the columns up to the first text. None
    if that is not possible."""
    unlimited = console.options.update(width=10_000)

    def fits(chosen: list[Column]) -> bool:
        return console.measure(_table(chosen), options=unlimited).minimum <= console.width

    keys = next((place for place, column in enumerate(columns, start=1) if not _is_numeric(column)), 1)
    first, rest = columns[:keys], columns[keys:]
    if not columns or not fits(first) or not all(fits([*first, column]) for column in rest):
        return
    if not rest:
        yield _table(first)
    while rest:
        count = next(count for count in range(len(rest), 0, -1) if fits([*first, *rest[:count]]))
        yield _table([*first, *rest[:count]])
        rest = rest[count:]


def _is_numeric(column: Column) -> bool:
    return len(column) > 1 and all(_NUMBER.fullmatch(cell) for cell in column[1:])


def _table(columns: list[Column]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        longest = max(len(word) for cell in column for word in cell.split() or [""])
        align: Literal["right", "left"] = "right" if _is_numeric(column) else "left"
        table.add_column(Text(column[0]), justify=align, overflow="fold", min_width=min(longest, WORD))
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
