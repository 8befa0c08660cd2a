"""The files of a job's output: which paths it may write, and how finished rows become the output.

    OUT                  the output; at its end, `OutputFiles.publish` replaces it atomically
    OUT.errors.jsonl     rows of an OpenAI batch that failed, if there are any
    OUT.partial          finished rows of an unfinished job
    OUT.record.json      configuration and metrics of the last run

For an output on an object store the partial output and the files before their upload are in the working folder, because
a store cannot append to a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.atomic_file import replacing, write_atomic, writing
from specbatch.files.text_files import UnreadableError, parse_json
from specbatch.jobs.dataset import is_dataset, is_saved, read_rows, write_rows
from specbatch.jobs.files import exists, is_remote, local_path, open_input, remove, upload
from specbatch.jobs.formats import COLUMNS, SOMETIMES
from specbatch.jobs.partial_output import Row

_EARLIER = r"\.(part|old)\d+"
_ERRORS, _PARTIAL, _RECORD = "errors.jsonl", "partial", "record.json"


class OutputFiles:
    """The paths of one output.

    name   as the user wrote it
    path   the local file or folder that becomes the output, or is uploaded
    url    None for a local output
    """

    def __init__(self, output: str | Path) -> None:
        """Raises SpecbatchError for an unknown format, and if the path is not an output's."""
        self.name = str(output)
        self.url = self.name if is_remote(output) else None
        self.path = _local_output(str(output)) if self.url is None else _working_copy(self.name)

    @property
    def is_jsonl(self) -> bool:
        return self.path.suffix == ".jsonl"

    @property
    def partial(self) -> Path:
        return _beside(self.path, _PARTIAL)

    @property
    def errors(self) -> str:
        """The name of the error file."""
        return f"{self.name}.{_ERRORS}"

    @property
    def record(self) -> str:
        return f"{self.name.rstrip('/')}.{_RECORD}"

    def exists(self) -> bool:
        """Whether the output would replace something; an empty folder does not count."""
        if self.url is not None:
            return exists("output", self.url)
        return self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir()))

    def check_is_not(self, source: str | Path) -> None:
        """Refuse an output that would change the input: the same file, by links too, or a folder of it, and an
        input with the name that earlier versions gave to this output before it was complete."""
        given = [self.name, self.errors, self.record] if self.url is not None else []
        written = [self.path, *(_beside(self.path, suffix) for suffix in (_PARTIAL, _RECORD, _ERRORS))]
        same = str(source) in given or (not is_remote(source) and any(_holds(path, source) for path in written))
        if same:
            raise refuse("output", self.name, f"would replace the input {source}; name another one")
        earlier = re.escape(os.path.abspath(self.path)) + _EARLIER
        if not is_remote(source) and re.fullmatch(earlier, os.path.abspath(local_path(source))):
            works = f"the input {source} has the name of an unfinished output of an earlier version; rename it"
            raise refuse("output", self.name, works)

    def check_beside(self, *, batch: bool) -> None:
        """Refuse files beside a new output that the job would replace and that no job has written, as far as that can
        be seen. batch: whether the job writes an error file."""
        for name, may_be in ((self.errors, False), (self.record, True)):
            if (name != self.errors or batch) and self._is_there(name) and not (may_be and self._is_record()):
                raise refuse("output", self.name, f"{name} already exists; name another output or pass overwrite=True")

    def _is_there(self, name: str) -> bool:
        return exists("output", name) if self.url is not None else Path(name).exists()

    def _is_record(self) -> bool:
        try:
            return bool(self.record_of()["workload"].get("command") == "generate")
        except SpecbatchError:
            return False

    def prepare(self) -> None:
        """Make the folder of the output. Raises UnwritableError."""
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=self.path.parent).close()

    def read(self) -> Iterator[Row]:
        """The rows of an existing output."""
        return _rows_of(self.name)

    def record_of(self) -> dict[str, Any]:
        """The record of an existing output. Raises SpecbatchError if there is none."""
        try:
            with open_input("output", self.record) as file:
                record = parse_json(file.read())
            if not isinstance(record["workload"], dict) or not isinstance(record["metrics"], dict):
                raise TypeError
        except (SpecbatchError, UnreadableError, KeyError, TypeError) as error:
            works = f"has no record in {self.record}, which names the settings of its job; use overwrite=True"
            raise refuse("output", self.name, works) from error
        found: dict[str, Any] = record
        return found

    def count(self) -> int | None:
        """Rows of an existing output; None if it cannot be read."""
        try:
            return sum(1 for _ in self.read())
        except (SpecbatchError, UnreadableError, OSError):
            return None

    def publish(self, rows: Iterable[Row], types: Mapping[str, str]) -> int:
        """Write the rows of the output and replace an existing one. Returns how many rows it has."""
        written = 0

        def counted() -> Iterator[Row]:
            nonlocal written
            for row in rows:
                written += 1
                yield row

        if self.is_jsonl:
            with jsonl_writer(self.path) as write:
                for row in counted():
                    write(row)
        else:
            write_rows(self.path, counted(), types)
        self._upload(self.path, self.name)
        return written

    def publish_batch(self, rows: Iterable[Row]) -> int:
        """Write rows of an OpenAI batch. Those with an `error` go to the error file; without them there is none.
        Returns how many the output has."""
        errors, written = _beside(self.path, _ERRORS), 0
        with ExitStack() as stack:
            write = stack.enter_context(jsonl_writer(self.path))
            write_error = None
            for row in rows:
                if row["error"] is None:
                    write(row)
                    written += 1
                    continue
                if write_error is None:  # it is replaced before the output is: contexts end in reverse order
                    write_error = stack.enter_context(jsonl_writer(errors))
                write_error(row)
            if write_error is None and self.url is None:
                errors.unlink(missing_ok=True)
        if self.url is not None and write_error is None:
            remove("output", self.errors)
        if write_error is not None:
            self._upload(errors, self.errors)
        self._upload(self.path, self.name)
        return written

    def publish_record(self, text: str) -> None:
        path = _beside(self.path, _RECORD)
        write_atomic(path, text)
        self._upload(path, self.record)

    def _upload(self, path: Path, target: str) -> None:
        if self.url is not None:
            upload("output", path, target)
            path.unlink()


@contextmanager
def jsonl_writer(path: Path) -> Iterator[Callable[[Row], object]]:
    """Yield a function that writes a line of JSON to a file, which replaces `path` when the block succeeds."""
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        yield lambda row: file.write(json.dumps(row) + "\n")


def read_output(output: Path) -> list[Row]:
    """The rows of a finished output: JSONL, Parquet or a folder. Raises SpecbatchError for an OpenAI batch."""
    rows = list(_rows_of(output))
    if any("custom_id" in row for row in rows):
        works = "is the output of an OpenAI batch, which has no numbers to compare; name another output of generate"
        raise refuse("output", str(output), works)
    # A cell of None is missing in a row of a data set; a failed row has no numbers.
    there = dict.fromkeys(name for name in COLUMNS if name not in SOMETIMES) | {"verify_steps": 0}
    return [there | row for row in rows]


def column_types(ids: str | None, present: Iterable[str]) -> dict[str, str]:
    """The types of the columns of a data set. ids: the type of the ids, None without; present: of `SOMETIMES`."""
    types = {name: kind for name, kind in COLUMNS.items() if name not in SOMETIMES or name in present}
    return types if ids is None else {"index": types["index"], "id": ids} | types | {"id": ids}


def _rows_of(output: str | Path) -> Iterator[Row]:
    if is_dataset(output):
        yield from read_rows("output", output, None, COLUMNS)
        return
    with open_input("output", output) as file:
        yield from map(parse_json, file)


def _local_output(output: str) -> Path:
    if output == "-":
        raise refuse("output", output, "standard output cannot be continued after an interruption; name a .jsonl file")
    path = local_path(output)
    if path.suffix in (".jsonl", ".parquet"):
        if path.is_dir():
            raise refuse("output", str(path), f"is a folder; name a {path.suffix} file")
        return path
    if path.suffix and not output.endswith("/"):
        works = "name a .jsonl or .parquet file, or a folder (ending in / if its name has a dot)"
        raise refuse("output", output, works)
    if path.exists() and not path.is_dir():
        raise refuse("output", str(path), "already exists and is not a folder; name another one")
    if path.is_dir() and not is_saved(path):
        raise refuse("output", str(path), "is a folder with other files; name a new one, or a .jsonl file")
    return path


def _working_copy(url: str) -> Path:
    """A local path for the output at a URL, the same for each run of a job in this working folder."""
    name = PurePosixPath(url.partition("://")[2])
    if name.suffix not in (".jsonl", ".parquet"):
        raise refuse("output", url, "name a .jsonl or .parquet file")
    return Path(f"{name.stem}-{hashlib.sha256(url.encode()).hexdigest()[:8]}{name.suffix}")


def _beside(output: Path, suffix: str) -> Path:
    return output.with_name(f"{output.name}.{suffix}")


def _holds(written: Path, source: str | Path) -> bool:
    """Whether writing to a path would change the input: it is the same file, by links too, or a folder of it."""
    given = local_path(source)
    same = written.exists() and given.exists() and written.samefile(given)
    real = Path(os.path.realpath(given))  # unlike `resolve` it takes a loop of links
    return same or Path(os.path.realpath(written)) in (real, *real.parents)
