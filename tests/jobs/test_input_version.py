"""An input that changes while it is read is an error in every format, and never a shorter answer."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest

from specbatch.errors import ChangedError, SpecbatchError
from specbatch.files.text_files import UnreadableError
from specbatch.jobs import prompt_file
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
        list(rows)


@pytest.mark.parametrize(("change", "what"), [(truncate, "changed"), (rewrite, "changed"), (replace, "changed")])
def test_no_line_of_a_changed_file_is_used(tmp_path: Path, change: Callable[[Path], None], what: str) -> None:
    """Lines that were read before the change may be; those of the next block are not."""
    path = write(tmp_path / "in.jsonl", 20_000)
    expected, rows = path.read_bytes().splitlines(), stream_rows("input", path, ())
    used = [next(rows)]
    change(path)
    with pytest.raises(ChangedError, match=what):
        used.extend(iter(partial(next, rows), None))
    assert [line for _, line in used] == expected[: len(used)]
    assert sum(len(line) + 1 for line in expected[: len(used)]) <= prompt_file.BLOCK


def test_a_change_is_found_before_the_next_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may take hours for the lines of a block."""
    monkeypatch.setattr(prompt_file, "SECONDS_BETWEEN_CHECKS", 0.0)
    path = write(tmp_path / "in.jsonl", 10)
    rows = stream_rows("input", path, ())
    next(rows)
    append(path)
    with pytest.raises(ChangedError, match="changed"):
        next(rows)


def test_a_large_file_is_not_checked_for_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, checks = write(tmp_path / "in.jsonl", 20_000), 0
    check = InputVersion.check

    def counted(self: InputVersion, **options: Any) -> None:
        nonlocal checks
        checks += 1
        check(self, **options)

    monkeypatch.setattr(InputVersion, "check", counted)
    assert len(list(stream_rows("input", path, ()))) == 20_000
    assert checks < 50


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 17])
def test_lines_do_not_depend_on_the_blocks(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_file, "BLOCK", block)
    monkeypatch.setattr(prompt_file, "LONGEST_LINE", 50)
    path = tmp_path / "in.jsonl"
    lines = [b"{}", b"", b"x" * 50, b"y" * 51, b"z" * 500, b" ", b"last"]
    path.write_bytes(codecs.BOM_UTF8 + b"\n".join(lines))
    found = dict(stream_rows("input", path, ()))
    assert list(found) == [1, 3, 4, 5, 7]
    assert (found[1], found[3], found[7]) == (b"{}", b"x" * 50, b"last")
    for number in (4, 5):
        with pytest.raises(UnreadableError, match="longer"):
            prompt_file.parse_line(found[number])


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
