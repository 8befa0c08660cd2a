"""Atomic replacement: a failed write keeps the old contents, and temporary files of killed processes are removed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specbatch.atomic_file import UnwritableError, remove_leftovers, replacing, scratch_folder, write_atomic


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
from specbatch.atomic_file import replacing
with replacing(Path(sys.argv[1]), folder=len(sys.argv) > 2):
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", [[], ["folder"]])
def test_part_of_a_killed_process_is_removed_and_that_of_a_running_one_is_kept(tmp_path: Path, kind: list[str]) -> None:
    path = tmp_path / "record.json"
    (tmp_path / "record.json.partial").touch()  # the names of other files
    (tmp_path / "other.json.part12").touch()
    before = names(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), *kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    part = f"record.json.part{process.pid}"
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
from specbatch.atomic_file import scratch_folder
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
    (tmp_path / "rows.old77").mkdir()
    (tmp_path / "rows.old77/kept").touch()
    remove_leftovers(tmp_path / "rows")
    assert names(tmp_path) == ["rows"]
    (tmp_path / "rows.old78").mkdir()
    remove_leftovers(tmp_path / "rows")
    assert names(tmp_path) == ["rows"]
