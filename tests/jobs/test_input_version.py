"""An input that changes while it is read is an error in every format, and never a shorter answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import datasets
import fsspec
import pytest

from specbatch.errors import ChangedError, SpecbatchError
from specbatch.jobs.input_version import InputVersion
from specbatch.jobs.prompt_file import stream_rows

ROWS = 3_000  # more than a batch of rows, and than a buffer


def write(path: Path, rows: int = ROWS) -> Path:
    """A file or a saved data set of the format that its name tells."""
    table = datasets.Dataset.from_dict({"prompt": [f"question {place}" for place in range(rows)]})
    if path.suffix == ".arrow":
        with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
            writer.write_table(table.data.table)
            writer.finalize()
    elif path.suffix:
        {".jsonl": table.to_json, ".csv": table.to_csv, ".parquet": table.to_parquet}[path.suffix](path)
    else:
        table.save_to_disk(path, num_shards=3)
    return path


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"prompt": "one more"}\n')


def rewrite(path: Path) -> None:
    """In place, with as many bytes."""
    content = path.read_bytes()
    path.write_bytes(content[::-1])


def replace(path: Path) -> None:
    """With the same contents and times, as `rsync -a` does."""
    copy, stat = path.with_suffix(".copy"), path.stat()
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    copy.replace(path)


CHANGES = {"changed": (truncate, append, rewrite, replace), "was removed": (Path.unlink,)}
EVERY = [(change, what) for what, changes in CHANGES.items() for change in changes]


@pytest.mark.parametrize(("change", "what"), EVERY)
@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.parquet", "in.arrow"])
def test_change_during_a_pass(tmp_path: Path, name: str, change: Callable[[Path], None], what: str) -> None:
    path = write(tmp_path / name)
    rows = stream_rows("input", path, ["prompt"])
    for _ in range(5):
        next(rows)
    change(path)
    with pytest.raises(
        ChangedError, match=rf"^input='.*{name}': {what} while it was read; put back what it was"
    ) as found:
        list(rows)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(("change", "what"), EVERY)
@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_change_between_two_passes(tmp_path: Path, name: str, change: Callable[[Path], None], what: str) -> None:
    path = write(tmp_path / name, 3)
    version = InputVersion("input", path)
    assert len(list(stream_rows("input", path, ["prompt"], version=version))) == 3
    assert len(list(stream_rows("input", path, ["prompt"], version=version))) == 3
    change(path)
    with pytest.raises(ChangedError, match=what):
        list(stream_rows("input", path, ["prompt"], version=version))


@pytest.mark.parametrize("change", [truncate, Path.unlink])
def test_a_file_of_a_folder_changes(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = write(tmp_path / "saved")
    rows = stream_rows("input", folder, ["prompt"])
    next(rows)
    change(max(folder.glob("*.arrow")))
    with pytest.raises(ChangedError, match="changed while it was read"):
        next(rows)


def test_file_on_a_store_changes_between_two_passes() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/changes/in.jsonl", b'{"prompt": "a"}\n')
    version = InputVersion("input", "memory://changes/in.jsonl")
    read = lambda: list(stream_rows("input", "memory://changes/in.jsonl", (), version=version))  # noqa: E731
    assert len(read()) == 1
    memory.pipe("/changes/in.jsonl", b'{"prompt": "b"}\n')
    with pytest.raises(ChangedError, match="changed"):
        read()
    memory.rm("/changes", recursive=True)
    with pytest.raises(SpecbatchError):
        read()


def test_link_that_points_elsewhere_is_another_input(tmp_path: Path) -> None:
    one, two, link = write(tmp_path / "a.jsonl", 2), write(tmp_path / "b.jsonl", 2), tmp_path / "in.jsonl"
    link.symlink_to(one)
    rows = stream_rows("input", link, ())
    next(rows)
    link.unlink()
    link.symlink_to(two)
    with pytest.raises(ChangedError):
        next(rows)


@pytest.mark.parametrize("source", ["missing.jsonl", "a\0b", "hf:owner/name", "nothing://bucket/in.jsonl"])
def test_source_that_cannot_be_read_is_no_change(source: str) -> None:
    """Whoever opens it reports why."""
    InputVersion("input", source).check(remote=True)


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.parquet"])
def test_every_run_reads_a_file_anew(tmp_path: Path, name: str) -> None:
    """Also one with the modification time of an earlier one, which `datasets.load_dataset` takes for the same."""
    for rows in (3, 4):
        path = write(tmp_path / name, rows)
        os.utime(path, (315532800, 315532800))
        assert len(list(stream_rows("input", path, ["prompt"]))) == rows
