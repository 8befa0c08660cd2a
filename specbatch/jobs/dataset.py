"""Reads and writes data sets with the Hugging Face `datasets` library.

Input: hf:OWNER/NAME[@REVISION][:CONFIG] with a split, a folder of `save_to_disk`, or a .parquet, .arrow, .csv or .tsv
file. Output: a .parquet file, or a folder of `save_to_disk`. JSON is read by `specbatch.jobs.prompts`, because the
library would turn strings that look like dates into dates.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specbatch.errors import SpecbatchError, refuse

HUB = "hf:"
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow"}
_SAVED = ("state.json", "dataset_info.json")


def is_dataset(source: str | Path) -> bool:
    """Whether `source` is read with `datasets`; everything else is JSON."""
    path = Path(source)
    return str(source).startswith(HUB) or path.suffix in (*_SEPARATORS, *_BUILDERS) or path.is_dir()


def read_rows(
    setting: str, source: str | Path, split: str | None, columns: Collection[str], beside: Collection[str] = ()
) -> list[dict[str, Any]]:
    """All rows of a data set, with those of `columns` and `beside` that it has. Cells of None are left out.

    Cells of .csv and .tsv are strings, unconverted. Raises SpecbatchError for a source that cannot be read, a split
    that is missing or does not exist, and a data set with none of `columns`.
    """
    try:
        with _quiet(), TemporaryDirectory(prefix="specbatch-") as cache:
            table = _split(source, _open(str(source), split, cache), split)
            names = table.column_names
            if not set(names) & set(columns):
                works = (
                    f"has columns {', '.join(names)}, but not {', '.join(columns)}; name one (generate --column NAME)"
                )
                raise refuse(setting, str(source), works)
            rows = table.select_columns([name for name in names if name in (*columns, *beside)]).to_list()
    except SpecbatchError:
        raise
    except Exception as error:  # errors of the library, Arrow, the network and the disk have no common base class
        cause = error.__cause__ or error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        line = next(iter(reason.strip().splitlines()), type(cause).__name__).rstrip(".")
        raise refuse(setting, str(source), f"cannot be read ({line}); name a JSONL file or a data set") from None
    return [_without_none(row) for row in rows]


def write_rows(output: Path, rows: Sequence[Mapping[str, Any]], types: Mapping[str, str]) -> None:
    """Write a table to `output` atomically: Parquet for .parquet, else a folder, replacing an existing one.

    types   of the columns, as Arrow names; [int32] is a list
    """
    from datasets import Dataset, Features, List, Value

    features = {
        name: List(Value(kind.strip("[]"))) if kind.startswith("[") else Value(kind) for name, kind in types.items()
    }
    columns = {name: [row.get(name) for row in rows] for name in types}
    part, old = (output.with_name(f"{output.name}.{what}{os.getpid()}") for what in ("part", "old"))
    try:
        with _quiet():
            table = Dataset.from_dict(columns, features=Features(features))
            if output.suffix == ".parquet":
                table.to_parquet(part)
            else:
                table.save_to_disk(part)
        if output.is_dir() and any(output.iterdir()):  # a folder cannot replace a non-empty one in one step
            os.replace(output, old)
        os.replace(part, output)
    except BaseException:
        if old.exists():
            os.replace(old, output)
        raise
    finally:
        for path in (part, old):
            shutil.rmtree(path, ignore_errors=True)
        part.unlink(missing_ok=True)


def is_saved(folder: Path) -> bool:
    """Whether the folder holds only files written by `save_to_disk`."""
    return all(path.name in _SAVED or path.suffix == ".arrow" for path in folder.iterdir())


def _open(source: str, split: str | None, cache: str) -> Any:
    from datasets import Dataset, load_dataset, load_from_disk

    path = Path(source)
    if source.startswith(HUB):
        name, _, config = source.removeprefix(HUB).partition(":")
        repository, _, revision = name.partition("@")
        if split is None:
            raise refuse("split", None, f"name the split of {source} to read, for example --split test")
        return load_dataset(repository, config or None, split=split, revision=revision or None)
    if path.is_dir():
        return load_from_disk(source)
    if path.suffix in _SEPARATORS:
        import pandas

        frame = pandas.read_csv(path, sep=_SEPARATORS[path.suffix], dtype=str, keep_default_na=False)
        return Dataset.from_dict(frame.to_dict("list"))
    path.open("rb").close()  # its error message is plainer than the library's
    return load_dataset(_BUILDERS[path.suffix], data_files=source, split="train", cache_dir=cache)


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
