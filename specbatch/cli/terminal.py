"""Prints Markdown to standard output, with tables that fit: cells are wrapped, and wide tables come in several parts.

Every command prints through `print_markdown`, so a command only has to make its Markdown. On a terminal tables are
drawn without Markdown's bars, and notes are wrapped between words. In a pipe a table that fits stays Markdown.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

Column = tuple[str, ...]  # heading and cells
WORD = 20  # characters of a word that are not broken
CELLS = (28, 12)  # characters of a cell that are not wrapped; the smaller one if all columns then fit
GAP = 2  # between columns
LEAST_WIDTH, WIDTH_OF_A_PIPE = 80, 100
_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")  # the line below the headings
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s?[%x]?|-|")
_NOTE = "* "


def print_markdown(text: str) -> None:
    """Print the text with tables of at most `width()` columns. A table that cannot fit is printed as it is."""
    from rich.console import Console

    on_terminal, limit = sys.stdout.isatty(), width()
    console = Console(width=limit)
    for in_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        block = list(lines)
        fits = not on_terminal and max(map(len, block)) <= limit
        parts = list(_parts(limit, _columns(block))) if in_table and not fits else []
        if not parts:
            print("\n".join(_wrapped(line, limit) if on_terminal else line for line in block), flush=True)
        for number, part in enumerate(parts):
            if number:
                console.print()
            console.print(part)


def width() -> int:
    """Columns of the terminal (or `COLUMNS`), at least 80; 100 where the output is no terminal."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH_OF_A_PIPE, 0)).columns)


def _wrapped(line: str, limit: int) -> str:
    """A note, wrapped between words; another line as it is, because it may be an answer of a model."""
    if not line.startswith(_NOTE) or len(line) <= limit:
        return line
    return textwrap.fill(line, limit, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _columns(lines: Sequence[str]) -> list[Column]:
    """The columns of a Markdown table; none if the lines are no table."""
    if len(lines) < 2 or not _RULE.fullmatch(lines[1].strip()):
        return []
    rows = [_cells(line) for index, line in enumerate(lines) if index != 1]
    return list(zip(*rows, strict=True)) if len(set(map(len, rows))) == 1 else []


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _parts(limit: int, columns: list[Column]) -> Iterator[Table]:
    """Tables of some columns each, at most `limit` wide. They all begin with the columns up to the first text. None if
    that is not possible."""

    def fits(chosen: list[Column], cell: int = CELLS[0]) -> bool:
        return sum(_least(column, cell) for column in chosen) + GAP * (len(chosen) - 1) <= limit

    keys = next((place for place, column in enumerate(columns, start=1) if not _is_numeric(column)), 1)
    first, rest = columns[:keys], columns[keys:]
    if not columns or not fits(first) or not all(fits([*first, column]) for column in rest):
        return
    if whole := next((cell for cell in CELLS if fits(columns, cell)), None):
        yield _table(columns, limit, whole)
        return
    while rest:
        count = next(count for count in range(len(rest), 0, -1) if fits([*first, *rest[:count]]))
        yield _table([*first, *rest[:count]], limit)
        rest = rest[count:]


def _is_numeric(column: Column) -> bool:
    return len(column) > 1 and all(_NUMBER.fullmatch(cell) for cell in column[1:])


def _least(column: Column, cell: int) -> int:
    """How narrow a column can be if words, and cells of at most `cell` characters, stay on one line."""
    word = max(map(len, " ".join(column).split()), default=1)
    return max(min(word, WORD), min(max(map(len, column[1:]), default=0), cell))


def _widths(columns: list[Column], limit: int, cell: int) -> list[int]:
    """Widths that together fill at most `limit`: as wide as the longest cell, the widest columns cut equally."""
    room, longest = limit - GAP * (len(columns) - 1), [max(map(len, column)) for column in columns]
    for most in range(max(longest), 0, -1):
        widths = [max(min(whole, most), _least(column, cell)) for column, whole in zip(columns, longest, strict=True)]
        if sum(widths) <= room:
            break
    return widths


def _table(columns: list[Column], limit: int, cell: int = CELLS[0]) -> Table:
    """cell: characters of a cell that are not wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), pad_edge=False, show_edge=False)
    for column, width in zip(columns, _widths(columns, limit, cell), strict=True):
        align: Literal["right", "left"] = "right" if _is_numeric(column) else "left"
        table.add_column(Text(column[0]), justify=align, overflow="fold", width=width)
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
