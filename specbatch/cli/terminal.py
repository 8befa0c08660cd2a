"""Prints Markdown to standard output, with tables that fit: cells are wrapped, and wide tables come in several parts.

Every command prints through `print_markdown`, so a command only has to make its Markdown. On a terminal tables are
drawn without Markdown's bars, and notes are wrapped between words. In a pipe a table that fits is printed as it is; one
that does not keeps Markdown's bars.
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
    from rich.console import Console
    from rich.table import Table

Column = tuple[str, ...]  # heading and cells
WORD = 20  # characters of a word that are not broken
CELL = 28  # characters of a cell that are not wrapped
LEAST_WIDTH, WIDTH_OF_A_PIPE = 80, 100
_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")  # the line below the headings
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s?[%x]?|-|")
_NOTE = "* "


def print_markdown(text: str) -> None:
    """Print the text with tables of at most `width()` columns. A table that cannot fit is printed as it is."""
    from rich.console import Console

    drawn, limit = sys.stdout.isatty(), width()
    console = Console(width=limit)
    for in_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        block = list(lines)
        fits = not drawn and max(map(len, block)) <= limit
        parts = list(_parts(console, _columns(block), drawn)) if in_table and not fits else []
        if not parts:
            print("\n".join(_wrapped(line, limit) if drawn else line for line in block), flush=True)
        elif drawn:
            console.print(*parts, sep="")
        else:
            print("\n\n".join(_as_markdown(console, part) for part in parts), flush=True)


def width() -> int:
    """Columns of the terminal (or `COLUMNS`), at least 80; 100 where the output is no terminal."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH_OF_A_PIPE, 0)).columns)


def _wrapped(line: str, limit: int) -> str:
    """A note, wrapped between words; another line as it is, because it may be an answer of a model."""
    if not line.startswith(_NOTE) or len(line) <= limit:
        return line
    return textwrap.fill(line, limit, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _as_markdown(console: Console, part: Table) -> str:
    with console.capture() as found:
        console.print(part)
    return "\n".join(line.rstrip() for line in found.get().splitlines() if line.strip())


def _columns(lines: Sequence[str]) -> list[Column]:
    """The columns of a Markdown table; none if the lines are no table."""
    if len(lines) < 2 or not _RULE.fullmatch(lines[1].strip()):
        return []
    rows = [_cells(line) for index, line in enumerate(lines) if index != 1]
    return list(zip(*rows, strict=True)) if len(set(map(len, rows))) == 1 else []


def _cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inner)]


def _parts(console: Console, columns: list[Column], drawn: bool) -> Iterator[Table]:
    """Tables of some columns each, which fit the console. They all begin with the columns up to the first text. None
    if that is not possible. drawn: for a terminal, not as Markdown."""
    unlimited = console.options.update(width=10_000)

    def fits(chosen: list[Column]) -> bool:
        return console.measure(_table(chosen, drawn), options=unlimited).minimum <= console.width

    keys = next((place for place, column in enumerate(columns, start=1) if not _is_numeric(column)), 1)
    first, rest = columns[:keys], columns[keys:]
    if not columns or not fits(first) or not all(fits([*first, column]) for column in rest):
        return
    if not rest:
        yield _table(first, drawn)
    while rest:
        count = next(count for count in range(len(rest), 0, -1) if fits([*first, *rest[:count]]))
        yield _table([*first, *rest[:count]], drawn)
        rest = rest[count:]


def _is_numeric(column: Column) -> bool:
    return len(column) > 1 and all(_NUMBER.fullmatch(cell) for cell in column[1:])


def _table(columns: list[Column], drawn: bool) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if drawn else box.MARKDOWN)
    for column in columns:
        word, cell = (max(map(len, texts), default=0) for texts in (" ".join(column).split(), column[1:]))
        least = max(min(word, WORD), min(cell, CELL))
        align: Literal["right", "left"] = "right" if _is_numeric(column) else "left"
        table.add_column(Text(column[0]), justify=align, overflow="fold", min_width=least)
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*(Text(cell if drawn else cell.replace("|", "\\|")) for cell in row))
    return table
