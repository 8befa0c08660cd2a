"""Atomic replacement: a failed write keeps the old contents, and temporary files of killed processes are removed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specbatch.files.atomic_file import (
    UnwritableError,
    is_leftover,
    remove_all_leftovers,
    remove_leftovers,
    replacing,
    scratch_folder,
    temporary_path,
    write_atomic,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("call", ["os.open", "os.fsync", "os.replace", "pathlib.Path.write_bytes"])
def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "record.json"
    write_atomic(path, "old")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(call, full)
    with pytest.raises(UnwritableError, match=r"record\.json cannot be written \(No space left on device\)"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert (path.read_text(), names(tmp_path)) == ("old", ["record.json"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 300, "File name too long"),
        ("file/under", "Not a directory"),
        ("missing/under", "No such file or directory"),
        ("folder", "Is a directory"),
        ("loop/under", "Too many levels of symbolic links"),
        ("a\0b", "not a valid path"),
    ],
)
def test_path_that_cannot_be_written(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/kept").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnwritableError) as found:
        write_atomic(tmp_path / name, "new")
    assert reason in str(found.value)
    assert names(tmp_path) == ["file", "folder", "loop"]
    assert (tmp_path / "folder/kept").read_text() == "kept"


def test_folder_replaces_a_folder(tmp_path: Path) -> None:
    for number in range(2):
        with replacing(tmp_path / "rows", folder=True) as part:
            (part / f"{number}.arrow").write_text("rows")
    assert names(tmp_path) == ["rows"]
    assert names(tmp_path / "rows") == ["1.arrow"]

    def fail() -> None:
        with replacing(tmp_path / "rows", folder=True) as part:
            (part / "2.arrow").write_text("rows")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(tmp_path) == ["rows"]
    assert names(tmp_path / "rows") == ["1.arrow"]


WRITER = """
import sys, time
from pathlib import Path
from specbatch.files.atomic_file import replacing
with replacing(Path(sys.argv[1]), folder=len(sys.argv) > 2):
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", [[], ["folder"]])
def test_part_of_a_killed_process_is_removed_and_that_of_a_running_one_is_kept(tmp_path: Path, kind: list[str]) -> None:
    path = tmp_path / "record.json"
    (tmp_path / "record.json.partial").touch()  # the names of other files
    temporary_path(tmp_path / "other.json").touch()
    before = names(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), *kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    (part,) = set(names(tmp_path)) - set(before)
    remove_leftovers(path)
    assert part in names(tmp_path), "its writer lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert part in names(tmp_path)
    write_atomic(path, "new")
    assert names(tmp_path) == sorted([*before, "record.json"])


SCRATCH = """
import sys, time
from pathlib import Path
from specbatch.files.atomic_file import scratch_folder
with scratch_folder(Path(sys.argv[1])) as scratch:
    (scratch / "half of a model").touch()
    print(scratch.name, flush=True)
    time.sleep(60)
"""


def test_scratch_folder_of_a_killed_process_is_removed_and_that_of_a_running_one_is_kept(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRATCH, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    theirs = process.stdout.readline().strip()
    with scratch_folder(tmp_path) as ours:
        assert names(tmp_path) == sorted([theirs, ours.name])
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(tmp_path) == [theirs]
    with scratch_folder(tmp_path) as ours:
        assert names(tmp_path) == [ours.name]
    assert names(tmp_path) == []


def test_folder_that_was_moved_away_by_a_killed_process_is_moved_back(tmp_path: Path) -> None:
    old = temporary_path(tmp_path / "rows", "old")
    old.mkdir()
    (old / "kept").touch()
    remove_leftovers(tmp_path / "rows")
    assert names(tmp_path) == ["rows"]
    temporary_path(tmp_path / "rows", "old").mkdir()
    remove_leftovers(tmp_path / "rows")
    assert names(tmp_path) == ["rows"]


def test_files_of_the_user_are_never_temporary(tmp_path: Path) -> None:
    """Names of earlier versions, of split files and backups, names in the form of ours, and one of ours renamed."""
    ours = temporary_path(tmp_path / "out").name
    renamed = "other" + ours.removeprefix("out")
    invented = f"out.specbatch-part-{'0123456789abcdef'}"
    mine = [
        "out.part1",
        "out.old1",
        "out.part",
        "out.specbatch-part-1",
        "out.tmp",
        ".part-7",
        invented,
        renamed,
        ours + ".gz",
    ]
    for name in mine:
        assert not is_leftover(tmp_path / name)
        (tmp_path / name).mkdir()
    (tmp_path / renamed.replace("other", "rows")).touch()
    for folder in (False, True):
        with replacing(tmp_path / ("rows" if folder else "out"), folder=folder), scratch_folder(tmp_path):
            pass
    remove_all_leftovers(tmp_path)
    assert names(tmp_path) == sorted([*mine, renamed.replace("other", "rows"), "out", "rows"])
    assert is_leftover(tmp_path / ours)


def test_names_of_temporary_files_differ() -> None:
    """Also with the same process number, as on two machines or in two containers that share a disk."""
    assert len({temporary_path(Path("out.jsonl")).name for _ in range(100)}) == 100
    assert is_leftover(temporary_path(Path("na\udcffme\nof bytes")))
