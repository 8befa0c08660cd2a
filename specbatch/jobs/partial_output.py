"""The partial output of a job: rows appended as they finish, so that an interrupted job can continue."""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import refuse
from specbatch.records.differences import describe_differences

SECONDS_BETWEEN_SYNCS = 5.0
Row = dict[str, Any]


class PartialRows:
    """JSONL in `path`: a header with the settings of the job, then rows, each with its `index`.

    rows   by index; after `load` they include the rows of an earlier run
    """

    def __init__(
        self,
        path: Path,
        header: Row,
        is_row: Callable[[Row], bool],
        *,
        start_over: str,
        may_differ: Collection[str] = (),
    ) -> None:
        """
        is_row       whether a row can belong to the job; may raise KeyError or TypeError for one that cannot
        start_over   what the user does to start from the beginning, for error messages
        may_differ   keys of the header that are for information only and may differ
        """
        self.path = path
        self.header: Row = json.loads(json.dumps(header))
        self.rows: dict[int, Row] = {}
        self._is_row = is_row
        self._start_over = start_over
        self._may_differ = may_differ

    def load(self) -> None:
        """Read the complete lines of the file. Raises SpecbatchError for the output of another job, or another file."""
        try:
            self._read(self.path.read_bytes())
        except OSError as error:
            works = f"cannot be read ({error.strerror}); name another output or {self._start_over}"
            raise refuse("output", str(self.path), works) from error

    def _read(self, text: bytes) -> None:
        self.rows.clear()
        if _line(self.header).encode().startswith(text):
            return  # only a header, which a crash may have truncated
        lines = text.split(b"\n")[:-1]
        header = parsed(lines[0]) if lines else None
        if not isinstance(header, dict) or not self.header.keys() & header.keys():
            works = f"is not the partial output of a job; name another output or {self._start_over}"
            raise refuse("output", str(self.path), works)
        if lacks := ", ".join(name for name in self.header if name not in header):
            works = f"finish it with that version, name another output or {self._start_over}"
            raise refuse(
                "output", str(self.path), f"was started by another version, which did not save {lacks}; {works}"
            )
        differs = [name for name in self.header if header[name] != self.header[name]]
        if set(differs) - set(self._may_differ) and len(lines) > 1:
            other = describe_differences(header, self.header, differs)
            works = f"was made with another {other}; finish that job, name another output or {self._start_over}"
            raise refuse("output", str(self.path), works)
        for number, line in enumerate(lines[1:], start=2):
            row = parsed(line)
            try:
                valid = self._is_row(row)
            except (KeyError, TypeError):
                valid = False
            if not valid:
                works = f"is not a row of this job; fix that line, name another output or {self._start_over}"
                raise refuse("output", f"{self.path}:{number}", works)
            self.rows[row["index"]] = row

    @contextmanager
    def claim(self, *, starts_over: bool = False) -> Iterator[Callable[[Row], None]]:
        """Lock the file for this process, and yield the function to call with every finished row.

        Under the lock, `rows` are read again: another process may have written since `load`. starts_over: drop them.
        """
        with self._locked() as file:
            file.seek(0)
            text = b"" if starts_over else file.read()
            self._read(text)
            whole = text[: text.rfind(b"\n") + 1] if self.rows else b""  # a crash may have truncated the last line
            file.truncate(len(whole))
            synced = time.monotonic()

            def write(row: Row) -> None:
                file.write(_line(row).encode())
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

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file at `path`, opened for appending and locked."""
        while True:
            with self.path.open("ab+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    works = "another process is writing to it; wait for that, or name another output"
                    raise refuse("output", str(self.path), works) from None
                if self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    yield file
                    return
            # Another process finished and removed the file between open and lock.


def row_seed(seed: int, index: int) -> int:
    """A seed that depends on the row and not on how many rows an earlier run had finished."""
    return random.Random(f"{seed}/{index}").getrandbits(31)


def parsed(line: bytes) -> Any:
    """The value of a line of JSON, or None if it is not valid JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
