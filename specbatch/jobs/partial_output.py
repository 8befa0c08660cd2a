"""The partial output of a job: rows appended as they finish, so that an interrupted job can continue."""

from __future__ import annotations

import fcntl
import json
import os
import random
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from specbatch.errors import ChangedError, refuse
from specbatch.files.atomic_file import writing
from specbatch.files.text_files import UnreadableError, parse_json
from specbatch.records.differences import describe_differences

SECONDS_BETWEEN_SYNCS = 5.0
# Settings of the engine that must not change when a job continues.
MAKES_TOKENS = (
    *("model", "tensor_parallel", "dtype", "kv_dtype", "fp8_activations", "state_dtype"),
    *("deterministic", "load_format", "tokenizer", "seed", "speculation"),
)
Row = dict[str, Any]
_MISSING = -1


class RowsOnDisk(Mapping[int, Row]):
    """Rows of a JSONL file by `index`, in ascending order. Memory holds the offset of each row: 8 bytes per index.

    failed   how many of them have an `error`
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.clear()

    def clear(self) -> None:
        self._offsets = array("q")
        self._errors: set[int] = set()
        self._count = 0

    @property
    def failed(self) -> int:
        return len(self._errors)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and 0 <= index < len(self._offsets) and self._offsets[index] != _MISSING

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (index for index, offset in enumerate(self._offsets) if offset != _MISSING)

    def __getitem__(self, index: int) -> Row:
        if index not in self:
            raise KeyError(index)
        with self._open() as file:
            return self._at(file, index)

    def ordered(self) -> Iterator[Row]:
        """All rows in the order of their index; the file is opened once."""
        with self._open() as file:
            for index in self:
                yield self._at(file, index)

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except OSError:
            raise _changed(self._path, "was removed") from None

    def _at(self, file: Any, index: int) -> Row:
        file.seek(self._offsets[index])
        row = parsed(file.readline())
        if not isinstance(row, dict) or row.get("index") != index:
            raise _changed(self._path, "was changed")
        return row

    def put(self, row: Row, offset: int) -> None:
        """The row is at `offset` of the file; an earlier row with its index is replaced."""
        index = row["index"]
        if index >= len(self._offsets):
            self._offsets.extend([_MISSING] * (index + 1 - len(self._offsets)))
        self._count += self._offsets[index] == _MISSING
        self._offsets[index] = offset
        (self._errors.add if row.get("error") is not None else self._errors.discard)(index)


class PartialRows:
    """JSONL in `path`: a header with the settings of the job, then rows, each with its `index`. The last row with an
    index counts.

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
        usual: Mapping[str, Row] = MappingProxyType({}),
        retry_failed: bool = False,
        note: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """
        is_row        whether a row can belong to the job; may raise KeyError or TypeError for one that cannot
        start_over    what the user does to start from the beginning, for error messages
        may_differ    keys of the header that are for information only and may differ
        usual         defaults of nested settings, which hold where an earlier version did not have the setting yet
        retry_failed  ignore rows with an `error`, so that they are missing
        note          saved with the header of a new file, and not compared; `load` reads that of the file
        """
        self.path = path
        self.header: Row = json.loads(json.dumps(header))
        self.rows = RowsOnDisk(path)
        self._is_row = is_row
        self._start_over = start_over
        self._may_differ = may_differ
        self._usual: dict[str, Row] = json.loads(json.dumps(dict(usual)))
        self._retry_failed = retry_failed
        self.note = self._given_note = dict(note)
        self._claimed: FileIO | None = None
        self._size = 0  # that the claimed file should have

    def load(self) -> None:
        """Read the complete lines of the file. Raises SpecbatchError for the output of another job, or another file."""
        self.note = {}
        try:
            self._read()
        except OSError as error:
            works = f"cannot be read ({error.strerror}); name another output or {self._start_over}"
            raise refuse("output", str(self.path), works) from error

    def _read(self) -> int:
        """Index the complete lines; returns how many bytes of the file to keep."""
        self.rows.clear()
        with self.path.open("rb") as file:
            first = file.readline()
            noted = _line(self.header | self._given_note).encode()
            if noted.startswith(first) or _line(self.header).encode().startswith(first):
                if not file.peek(1):  # only a header, which a crash may have truncated
                    if first.endswith(b"\n"):
                        self.note = self._given_note if first == noted else {}
                    return 0
            elif not first.endswith(b"\n"):
                first = b""
            matches = self._check_header(parsed(first))
            offset = len(first)
            for number, line in enumerate(file, start=2):
                if not line.endswith(b"\n"):
                    break  # truncated by a crash
                if not matches:
                    raise self._other_job(parsed(first))
                self._index(number, line, offset)
                offset += len(line)
        return offset if self.rows or offset > len(first) else 0

    def _check_header(self, header: Any) -> bool:
        """Whether it is the header of this job."""
        if not isinstance(header, dict) or not self.header.keys() & header.keys():
            works = f"is not the partial output of a job; name another output or {self._start_over}"
            raise refuse("output", str(self.path), works)
        if lacks := ", ".join(name for name in self.header if name not in header):
            works = f"finish it with that version, name another output or {self._start_over}"
            raise refuse(
                "output", str(self.path), f"was started by another version, which did not save {lacks}; {works}"
            )
        self.note = {name: value for name, value in header.items() if name not in self.header}
        return not set(self.differences(header)) - set(self._may_differ)

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """The settings of the job that another header, or the workload of a record, does not have alike."""
        return [name for name, value in self.header.items() if self._completed(name, other.get(name)) != value]

    def _completed(self, name: str, value: Any) -> Any:
        return {**self._usual[name], **value} if name in self._usual and isinstance(value, dict) else value

    def _other_job(self, header: Row) -> Exception:
        completed = {name: self._completed(name, value) for name, value in header.items()}
        other = describe_differences(completed, self.header, self.differences(header))
        works = f"was made with another {other}; finish that job, name another output or {self._start_over}"
        return refuse("output", str(self.path), works)

    def _index(self, number: int, line: bytes, offset: int) -> None:
        row = parsed(line)
        try:
            valid = type(row["index"]) is int and self._is_row(row)
        except (KeyError, TypeError):
            valid = False
        if not valid:
            works = f"is not a row of this job; fix that line, name another output or {self._start_over}"
            raise refuse("output", f"{self.path}:{number}", works)
        if not self._retry_failed or row.get("error") is None:
            self.rows.put(row, offset)

    @contextmanager
    def claim(self, *, starts_over: bool = False) -> Iterator[Callable[[Row], None]]:
        """Lock the file for this process, and yield the function to call with every finished row.

        Under the lock, `rows` are read again: another process may have written since `load`. starts_over: drop them.
        """
        with self._locked() as file:
            if starts_over:
                self.rows.clear()
            end = 0 if starts_over else self._read()
            file.truncate(end)  # a crash may have truncated the last line
            self._claimed, self._size = file, end
            synced = time.monotonic()

            def write(row: Row) -> int:
                self.check()
                at, rest = self._size, memoryview(_line(row).encode())
                try:
                    with writing(self.path):
                        while rest:
                            rest = rest[file.write(rest) :]
                finally:
                    self._size = os.fstat(file.fileno()).st_size
                return at

            def keep(row: Row) -> None:
                nonlocal synced
                self.rows.put(row, write(row))
                if time.monotonic() - synced > SECONDS_BETWEEN_SYNCS:
                    os.fsync(file.fileno())
                    synced = time.monotonic()

            if not end:
                write(self.header | self.note)
            try:
                yield keep
                self.check()
            finally:
                os.fsync(file.fileno())
                self._claimed = None

    def check(self) -> None:
        """Raises ChangedError if the claimed file is no longer as this process wrote it."""
        if self._claimed is None:
            return
        now = os.fstat(self._claimed.fileno())
        try:
            there = self.path.exists() and os.path.samestat(now, self.path.stat())
        except OSError:  # removed between the two calls
            there = False
        if not there:
            raise _changed(self.path, "was removed or replaced")
        if now.st_size != self._size:
            raise _changed(self.path, "was changed")

    def or_lost(self, kept: str) -> str:
        """`kept`, which says that the file has finished rows, or that this is no longer so."""
        try:
            self.check()
        except ChangedError as error:
            return str(error)
        return kept

    def remove(self) -> None:
        """Remove the claimed file, unless another has its place."""
        with suppress(ChangedError):
            self.check()
            self.path.unlink()
        self._claimed = None

    @contextmanager
    def _locked(self) -> Iterator[FileIO]:
        """The file at `path`, opened for appending, unbuffered and locked."""
        while True:
            with writing(self.path):
                opened = self.path.open("ab+", buffering=0)
            with opened as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    works = "another process is writing to it; wait for that, or name another output"
                    raise refuse("output", str(self.path), works) from None
                if self.path.exists() and os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    yield file
                    return
            # Another process finished and removed the file between open and lock.


def _changed(path: Path, what: str) -> ChangedError:
    works = "run the job again (with --overwrite if the file is still there)"
    error = ChangedError(f"{path} {what} by something else during the job, so its answers are lost; {works}")
    error.kept = ""
    return error


def row_seed(seed: int, index: int | str) -> int:
    """A seed that depends on the row and not on how many rows an earlier run had finished."""
    return random.Random(f"{seed}/{index}").getrandbits(31)


def parsed(line: bytes) -> Any:
    """The value of a line of JSON, or None if it is not valid JSON."""
    try:
        return parse_json(line)
    except UnreadableError:
        return None


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
