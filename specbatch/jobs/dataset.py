"""Reads and writes data sets in batches of rows, so that they may be larger than memory.

Input: a .parquet, .arrow, .csv or .tsv file; with the Hugging Face `datasets` library hf:OWNER/NAME[@REVISION][:CONFIG]
and a split, or a folder of `save_to_disk`. Output: a .parquet file, or a folder of `save_to_disk`. JSON is read by
`specbatch.jobs.prompt_file`, because `datasets` would turn strings that look like dates into dates.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specbatch.errors import SpecbatchError, refuse
from specbatch.files.atomic_file import is_leftover, replacing
from specbatch.files.text_files import TEMPORARY, UnreadableError
from specbatch.jobs.files import is_remote, open_input
from specbatch.jobs.input_version import HUB

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_ARROW = (".parquet", ".arrow")
BATCH = 1_000  # rows that are read or written at a time
_SAVED = ("state.json", "dataset_info.json")


def is_dataset(source: str | Path) -> bool:
    """Whether `source` is a data set; everything else is JSON."""
    if Path(source).suffix in (*_SEPARATORS, *_ARROW):
        return True
    return not is_remote(source) and (str(source).startswith(HUB) or Path(source).is_dir())


def read_rows(
    setting: str,
    source: str | Path,
    split: str | None,
    columns: Collection[str],
    beside: Collection[str] = (),
    unread: list[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of a data set, with those of `columns` and `beside` that it has. Cells of None are left out. The names
    of its other columns are written to `unread`.

    Cells of .csv and .tsv are strings, unconverted. Raises SpecbatchError for a source that cannot be read, a split
    that is missing or does not exist, and a data set with none of `columns`.
    """
    wanted = _Columns(setting, source, columns, beside, [] if unread is None else unread)
    path = Path(source)
    try:
        with _quiet():
            if path.suffix in _SEPARATORS or path.suffix in _ARROW:
                if split is not None:
                    raise refuse("split", split, f"{source} has no splits; leave it out")
                batches = _file_batches(setting, source, wanted)
            else:
                batches = _library_batches(_split(source, _open(str(source), split), split), wanted)
            for batch in batches:
                yield from map(_without_none, batch)
    except SpecbatchError:
        raise
    except Exception as error:  # errors of the library, Arrow, the network and the disk have no common base class
        cause = error.__cause__ or error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        line = next(iter(reason.strip().splitlines()), type(cause).__name__).rstrip(".")
        raise refuse(setting, str(source), f"cannot be read ({line}); name a JSONL file or a data set") from None


def write_rows(output: Path, rows: Iterable[Mapping[str, Any]], types: Mapping[str, str]) -> None:
    """Write a table to `output` atomically: Parquet for .parquet, else a folder, replacing an existing one. Rows are
    written in batches.

    types   of the columns, as Arrow names; [int32] is a list
    """
    is_file = output.suffix == ".parquet"
    with replacing(output, folder=not is_file) as part, _quiet():
        (_write_parquet if is_file else _write_folder)(part, rows, types)


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]], types: Mapping[str, str]) -> None:
    import pyarrow.parquet

    schema = _schema(types)
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        for batch in _batches(rows, schema):
            file.write_batch(batch)


def _write_folder(folder: Path, rows: Iterable[Mapping[str, Any]], types: Mapping[str, str]) -> None:
    import pyarrow
    from datasets import Dataset

    schema = _schema(types)
    with TemporaryDirectory(dir=folder) as made:
        path = Path(made) / "rows.arrow"
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as file:
            for batch in _batches(rows, schema):
                file.write_batch(batch)
        Dataset.from_file(str(path)).save_to_disk(folder)


def _schema(types: Mapping[str, str]) -> Any:
    import pyarrow

    def column(kind: str) -> Any:
        return pyarrow.list_(column(kind.strip("[]"))) if kind.startswith("[") else getattr(pyarrow, kind)()

    return pyarrow.schema([(name, column(kind)) for name, kind in types.items()])


def _batches(rows: Iterable[Mapping[str, Any]], schema: Any) -> Iterator[Any]:
    """Record batches of `BATCH` rows; one without rows if there are none."""
    import pyarrow

    remaining = iter(rows)
    batch: Sequence[Mapping[str, Any]] | None = None
    while batch is None or len(batch) == BATCH:
        batch = list(islice(remaining, BATCH))
        yield pyarrow.RecordBatch.from_pydict({name: [row.get(name) for row in batch] for name in schema.names}, schema)


def is_saved(folder: Path) -> bool:
    """Whether the folder holds only files written by `save_to_disk`."""
    return all(path.name in _SAVED or path.suffix == ".arrow" for path in folder.iterdir())


class _Columns:
    """Which columns of a data set are read."""

    def __init__(
        self, setting: str, source: str | Path, columns: Collection[str], beside: Collection[str], unread: list[str]
    ) -> None:
        self._setting, self._source, self._columns, self._beside = setting, source, columns, beside
        self._unread = unread

    def of(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are read. Raises SpecbatchError if none is a column of prompts."""
        if not set(names) & set(self._columns):
            listed = f"has columns {', '.join(names)}, but not {', '.join(self._columns)}"
            raise refuse(self._setting, str(self._source), f"{listed}; name one (generate --column NAME)")
        read = [name for name in names if name in (*self._columns, *self._beside)]
        if twice := [name for name in read if read.count(name) > 1]:
            raise refuse(self._setting, str(self._source), f"has more than one column {twice[0]}; keep one")
        self._unread[:] = [name for name in names if name not in read]
        return read


def _file_batches(setting: str, source: str | Path, wanted: _Columns) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file in lists: Parquet and CSV in batches of `BATCH` rows, .arrow in its own batches."""
    suffix = Path(source).suffix
    with open_input(setting, source) as file:
        if suffix in _SEPARATORS:
            import pandas

            frames = pandas.read_csv(file, sep=_SEPARATORS[suffix], dtype=str, keep_default_na=False, chunksize=BATCH)
            for frame in frames:
                yield frame[wanted.of(list(frame.columns))].to_dict("records")  # type: ignore[misc]
        elif suffix == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.ParquetFile(file)
            columns = wanted.of(table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=BATCH, columns=columns):
                yield batch.to_pylist()
        else:
            import pyarrow

            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            table = pyarrow.ipc.open_file(file) if is_file else pyarrow.ipc.open_stream(file)
            columns = wanted.of(table.schema.names)
            batches = map(table.get_batch, range(table.num_record_batches)) if is_file else table
            for batch in batches:
                yield batch.select(columns).to_pylist()


def _library_batches(table: Any, wanted: _Columns) -> Iterator[list[dict[str, Any]]]:
    """The rows of a `datasets.Dataset`, which is mapped into memory, in lists."""
    table = table.select_columns(wanted.of(table.column_names)).with_format("arrow")
    for batch in table.iter(BATCH):
        yield batch.to_pylist()


def _open(source: str, split: str | None) -> Any:
    from datasets import load_dataset, load_from_disk

    if not source.startswith(HUB):
        if is_leftover(Path(source)):
            raise UnreadableError(TEMPORARY)
        return load_from_disk(source)
    name, _, config = source.removeprefix(HUB).partition(":")
    repository, _, revision = name.partition("@")
    if split is None:
        raise refuse("split", None, f"name the split of {source} to read, for example --split test")
    return load_dataset(repository, config or None, split=split, revision=revision or None)


def _split(source: str | Path, found: Any, split: str | None) -> Any:
    """The table of the split."""
    if not isinstance(found, dict):
        if split is not None and not str(source).startswith(HUB):
            raise refuse("split", split, f"{source} has no splits; leave it out")
        return found
    names = list(found)
    if split is None and len(names) == 1:
        return found[names[0]]
    if split not in names:
        raise refuse("split", split, f"{source} has splits {', '.join(names)}; use one of them")
    return found[split]


def _without_none(value: Any) -> Any:
    """Drop cells of None: a table has a cell for every key that occurs in any row."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_none(item) for item in value]
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's progress bars and logs; its errors become ours."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, disabled = logging.getLogger("datasets"), are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not disabled:
            enable_progress_bars()
