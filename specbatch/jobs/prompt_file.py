"""Streams the rows of a prompt file or data set: lines of JSONL, items of a JSON array, rows of a table."""

from __future__ import annotations

import codecs
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.text_files import LARGEST, UnreadableError, parse_json
from specbatch.jobs.dataset import is_dataset, read_rows
from specbatch.jobs.files import open_input
from specbatch.jobs.input_version import InputVersion

LONGEST_LINE = 16 << 20  # bytes
BLOCK = 1 << 17  # bytes that are read at a time
SECONDS_BETWEEN_CHECKS = 1.0  # of an input while rows of a block are used


def location(source: str | Path, line: int) -> str:
    """FILE:LINE for a line of JSONL; for a data set or a JSON array, whose rows are not lines, the row."""
    return f"{source} row {line}" if is_dataset(source) or Path(source).suffix == ".json" else f"{source}:{line}"


def stream_rows(
    setting: str,
    source: str | Path,
    columns: Collection[str],
    beside: Collection[str] = (),
    split: str | None = None,
    *,
    version: InputVersion | None = None,
    unread: list[str] | None = None,
) -> Iterator[tuple[int, bytes | Any]]:
    """Rows with their numbers from 1: lines that are not blank as bytes, all others as values.

    columns, beside, split, unread   of a data set, as in `read_rows`
    version                          of the source as an earlier pass saw it; None: as it is now

    Raises SpecbatchError for a source that cannot be read, and ChangedError for one that changes meanwhile.
    """
    version = version or InputVersion(setting, source)
    version.check(remote=True)
    checked = time.monotonic()
    try:
        for row in _rows(setting, source, columns, beside, split, version, unread):
            if not isinstance(row[1], bytes) or time.monotonic() - checked > SECONDS_BETWEEN_CHECKS:
                version.check()
                checked = time.monotonic()
            yield row
    except SpecbatchError:
        version.check(remote=True)  # the cause, for example, of half a line
        raise
    version.check(remote=True)


def _rows(
    setting: str,
    source: str | Path,
    columns: Collection[str],
    beside: Collection[str],
    split: str | None,
    version: InputVersion,
    unread: list[str] | None,
) -> Iterator[tuple[int, bytes | Any]]:
    if is_dataset(source):
        yield from enumerate(read_rows(setting, source, split, columns, beside, unread), start=1)
        return
    if split is not None:
        raise refuse("split", split, f"{source} has no splits; leave it out")
    with open_input(setting, source) as file:
        if Path(source).suffix == ".json" and _starts_array(file):
            yield from enumerate(_array(setting, source, file), start=1)
        else:
            yield from ((number, line) for number, line in enumerate(_lines(file, version), start=1) if line.strip())


def parse_line(line: bytes) -> Any:
    """The value of a line of JSON. Raises UnreadableError."""
    if len(line) > LONGEST_LINE:
        raise UnreadableError(f"is longer than {LONGEST_LINE >> 20} MiB")
    return parse_json(line, unique=True)


def _lines(file: BinaryIO, version: InputVersion) -> Iterator[bytes]:
    """Lines without a byte order mark. One that is longer than `LONGEST_LINE` is cut, but stays longer than that.

    They are read in blocks, and none of a block is used unless the file is the same after the block was read.
    """
    file.seek(len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0)
    begun: list[bytes] = []  # parts of a line whose end is in a later block
    size = 0
    while block := file.read(BLOCK):
        version.check()
        *whole, rest = block.split(b"\n")
        if whole:
            begun.append(whole[0])
            whole[0] = b"".join(begun)
            begun, size = [], 0
            yield from whole
        if rest and size <= LONGEST_LINE:
            begun.append(rest)
            size += len(rest)
    if begun:
        yield b"".join(begun)


def _starts_array(file: BinaryIO) -> bool:
    start = file.read(1 << 16).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _array(setting: str, source: str | Path, file: BinaryIO) -> Any:
    """The items of a JSON array, which is read as a whole."""
    content = file.read(LARGEST["JSON"] + 1)
    try:
        if len(content) > LARGEST["JSON"]:
            raise UnreadableError(f"is larger than {LARGEST['JSON'] >> 20} MiB")
        return parse_json(content.removeprefix(codecs.BOM_UTF8), unique=True)
    except UnreadableError as error:
        works = "write an array of objects, or one object a line (.jsonl), which is streamed"
        raise refuse(setting, str(source), f"{str(error).removeprefix('is ')}; {works}") from None
