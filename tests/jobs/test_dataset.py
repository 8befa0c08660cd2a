"""Reading data sets as the library wrote them, and writing tables atomically."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from specbatch.errors import SpecbatchError
from specbatch.jobs import dataset
from specbatch.jobs.dataset import is_dataset, is_saved, write_rows

ROWS = [
    {"prompt": "a\nb", "id": "007", "other": "x"},
    {"prompt": 'é, "c"', "id": "1e3", "other": "y"},
    {"prompt": "NA", "id": "12", "other": "z"},
]
WANTED = [{"prompt": row["prompt"], "id": row["id"]} for row in ROWS]


def read_rows(*arguments):
    return list(dataset.read_rows(*arguments))


TYPES = {"index": "int64", "id": "string", "token_ids": "[int32]", "accept_length": "float64"}
OUT = [{"index": 0, "id": "a", "token_ids": [1, 2]}, {"index": 4, "token_ids": [], "accept_length": None}]


def saved(path: Path) -> str:
    """ROWS at `path`, in the format of its name."""
    table = datasets.Dataset.from_list(ROWS)
    if path.suffix in (".csv", ".tsv"):
        table.to_csv(path, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".arrow":
        table.save_to_disk(path.parent / "made")
        (path.parent / "made" / "data-00000-of-00001.arrow").rename(path)
    else:
        table.save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("name", ["d.csv", "d.tsv", "d.parquet", "d.arrow", "folder"])
def test_rows_are_read_unconverted(tmp_path, name, capfd):
    source = saved(tmp_path / name)
    capfd.readouterr()
    assert is_dataset(source)
    assert read_rows("input", source, None, ("prompt", "question"), ("id",)) == WANTED
    assert capfd.readouterr().err == ""  # no bars of the library
    with pytest.raises(SpecbatchError, match=r"split='a': .* has no splits; leave it out"):
        read_rows("input", source, "a", ("prompt",))
    with pytest.raises(SpecbatchError, match="has columns prompt, id, other, but not text; name one"):
        read_rows("input", source, None, ("text",), ("id",))


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow"])
def test_a_prompt_in_two_columns_is_refused(tmp_path, name):
    """Only the last would be read. Others may occur twice."""
    for names, refused in ((["prompt", "prompt", "x"], True), (["prompt", "x", "x"], False)):
        table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=names)
        if name == "d.parquet":
            pyarrow.parquet.write_table(table, tmp_path / name)
        else:
            with pyarrow.ipc.new_file(tmp_path / name, table.schema) as file:
                file.write_table(table)
        if refused:
            with pytest.raises(SpecbatchError, match=r"has more than one column prompt; keep one"):
                read_rows("input", tmp_path / name, None, ["prompt"])
        else:
            assert read_rows("input", tmp_path / name, None, ["prompt"]) == [{"prompt": "a"}]


def test_missing_cells_are_left_out(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "c"}]
    rows = [{"prompt": "a"}, {"messages": chat}, {"prompt_token_ids": [1, 2]}]
    path = tmp_path / "d.parquet"
    datasets.Dataset.from_dict({key: [row.get(key) for row in rows] for row in rows for key in row}).to_parquet(path)
    assert read_rows("input", path, None, ("prompt", "messages", "prompt_token_ids")) == rows


def test_folder_of_splits(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"a": table, "b": table.select([2])}).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"a": table}).save_to_disk(tmp_path / "one")
    assert read_rows("input", tmp_path / "two", "b", ("prompt",)) == [{"prompt": "NA"}]
    assert len(read_rows("input", tmp_path / "one", None, ("prompt",))) == 3
    for split in (None, "c"):
        with pytest.raises(SpecbatchError, match=f"split={split!r}: .*two has splits a, b; use one of them"):
            read_rows("input", tmp_path / "two", split, ("prompt",))


def test_data_set_of_the_hub(use_hub):
    seen = []

    def load(*names, **options):
        seen.append((names, options))
        return datasets.Dataset.from_list(ROWS)

    use_hub(load)
    assert read_rows("input", "hf:owner/name@v1:main", "train[:3]", ("prompt",), ("id",)) == WANTED
    read_rows("input", "hf:owner/name", "test", ("prompt",))
    assert seen == [
        (("owner/name", "main"), {"split": "train[:3]", "revision": "v1"}),
        (("owner/name", None), {"split": "test", "revision": None}),
    ]
    with pytest.raises(SpecbatchError, match="split=None: name the split of hf:owner/name to read"):
        read_rows("input", "hf:owner/name", None, ("prompt",))


def test_unreachable_hub(use_hub):
    def offline(*names, **options):
        raise ConnectionError("no route.\nat all")

    use_hub(offline)
    with pytest.raises(SpecbatchError, match=r"input='hf:a/b': cannot be read \(no route\); name a JSONL file"):
        read_rows("input", "hf:a/b", "test", ("prompt",))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("d.parquet", "hello", "Parquet"),
        ("d.csv", 'prompt\n"a', "EOF inside string"),
        ("d.csv", "", "No columns"),
        ("none.parquet", None, r"\(No such file or directory\)"),
        ("none.csv", None, r"\(No such file or directory\)"),
    ],
)
def test_errors_contain_the_librarys_reason(tmp_path, name, content, reason, capfd, monkeypatch):
    logged = logging.Handler()
    logged.emit = lambda record: print(record.getMessage(), file=sys.stderr)  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [logged])
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpecbatchError, match=f"{name}': cannot be read .*{reason}"):
        read_rows("input", tmp_path / name, None, ("prompt",))
    assert capfd.readouterr().err == ""


def loaded(path):
    return datasets.load_from_disk(path) if path.is_dir() else datasets.Dataset.from_parquet(str(path))


@pytest.mark.parametrize("name", ["out.parquet", "out"])
def test_written_table_has_types_and_replaces_an_old_one(tmp_path, name, capfd):
    path = tmp_path / name
    for rows in (OUT[:1], OUT):
        write_rows(path, rows, TYPES)
        found = loaded(path)
        assert found.to_list() == [dict.fromkeys(TYPES) | row for row in rows]
        assert found.features["accept_length"].dtype == "float64"  # though there is none
        assert found.features["token_ids"].feature.dtype == "int32"
    assert list(tmp_path.iterdir()) == [path]
    assert not path.is_dir() or is_saved(path)


@pytest.mark.parametrize("name", ["out.parquet", "out"])
@pytest.mark.parametrize("fails", ["convert", "move"])
def test_failed_write_keeps_the_old_table(tmp_path, monkeypatch, name, fails):
    path = tmp_path / name
    write_rows(path, OUT[:1], TYPES)
    replace = os.replace

    def move(source, target):
        if fails == "move" and ".specbatch-part-" in Path(source).name:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("specbatch.files.atomic_file.os.replace", move)
    with pytest.raises((ValueError, KeyboardInterrupt)):
        write_rows(path, OUT if fails == "move" else [{"index": "no number"}], TYPES)
    assert list(tmp_path.iterdir()) == [path]
    assert len(loaded(path)) == 1


def test_folder_with_other_files_is_not_a_saved_data_set(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path)
    assert is_saved(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert not is_saved(tmp_path)
