"""Rows of a job under way: appended as they finish, so that an interruption loses none and the same job goes on."""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbatch.errors import refuse
from specbatch.records.differences import describe_differences

SECONDS_BETWEEN_SYNCS = 5.0
Row = dict[str, Any]


class PartialRows:
    """Lines of JSON in `path`: a header, which says what the rows are made from, and rows, each with its `index`.

    rows: by index, those that an earlier run left among them once they are loaded.
    """

    def __init__(
        self, path: Path, header: Row, is_row: Callable[[Row], bool], *, anew: str, told: Collection[str] = ()
    ) -> None:
        """is_row: may this row be one of the job? It need not expect the right keys and types. anew: what a user does
        to begin from the start. told: what the header says for people alone, and may differ."""
        self.path = path
        self.header: Row = json.loads(json.dumps(header))
        self.rows: dict[int, Row] = {}
        self._is_row = is_row
        self._anew = anew
        self._told = told

    def load(self) -> None:
        """Take over the file's whole lines. Refused: rows of a job with another header, and what is no such file."""
        try:
            text = self.path.read_bytes()
        except OSError as error:
            works = f"cannot be read ({error.strerror}); name another output or {self._anew}"
            raise refuse("output", str(self.path), works) from error
        if _line(self.header).encode().startswith(text):
            return  # nothing but a header, which a crash may have cut short
        lines = text.split(b"\n")[:-1]
        header = parsed(lines[0]) if lines else None
        if not isinstance(header, dict) or not self.header.keys() & header.keys():
            works = f"has no header that says what it was made from; name another output or {self._anew}"
            raise refuse("output", str(self.path), works)
        if lacks := ", ".join(name for name in self.header if name not in header):
            works = f"finish it with that one, name another output or {self._anew}"
            said = f"was begun by another version, whose header does not say {lacks}; {works}"
            raise refuse("output", str(self.path), said)
        differs = [name for name in self.header if header[name] != self.header[name]]
        if set(differs) - set(self._told) and len(lines) > 1:
            other = describe_differences(header, self.header, differs)
            works = f"was made with another {other}; finish that job, name another output or {self._anew}"
            raise refuse("output", str(self.path), works)
        for number, line in enumerate(lines[1:], start=2):
            row = parsed(line)
            try:
                valid = self._is_row(row)
            except (KeyError, TypeError):
                valid = False
            if not valid:
                works = f"is no row of this job; mend that line, name another output or {self._anew}"
                raise refuse("output", f"{self.path}:{number}", works)
            self.rows[row["index"]] = row

    @contextmanager
    def claim(self) -> Iterator[Callable[[Row], None]]:
        """Hold the file as this process's alone; what comes is called with every row that is finished."""
        with self.path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                works = "another process is writing it; wait for that or name another output"
                raise refuse("output", str(self.path), works) from None
            file.seek(0)
            whole = _whole_lines(file.read()) if self.rows else ""
            file.truncate(len(whole.encode()))
            synced = time.monotonic()

            def write(row: Row) -> None:
                file.write(_line(row))
                file.flush()

            def keep(row: Row) -> None:
                nonlocal synced
                self.rows[row["index"]] = row
                write(row)
                if time.monotonic() - synced > SECONDS_BETWEEN_SYNCS:
                    os.fsync(file.fileno())
                    synced = time.monotonic()

            if not whole:
                write(self.header)
            try:
                yield keep
            finally:
                file.flush()
                os.fsync(file.fileno())


def row_seed(seed: int, index: int) -> int:
    """A seed that depends on the row, not on how many an earlier run had finished."""
    return random.Random(f"{seed}/{index}").getrandbits(31)


def parsed(line: bytes) -> Any:
    """What a line of JSON holds, None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def _whole_lines(text: str) -> str:
    """Without a last line that a crash cut short."""
    return text[: text.rfind("\n") + 1]
