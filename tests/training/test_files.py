"""The files of a head are published together."""

from __future__ import annotations

import fcntl
import os

import pytest

from specbatch.files.atomic_file import scratch_folder
from specbatch.training.files import staged


def test_files_are_published_atomically(tmp_path, watch):
    """Also over the remains of a crash, links and partial files; config.json appears last."""
    order = watch(os, "replace", before=lambda path, place: place.name)
    folder, source = tmp_path / "head", tmp_path / "source"
    folder.mkdir()
    with scratch_folder(folder) as left:
        name = left.name
    (folder / name / "half a head").mkdir(parents=True)
    source.touch()
    os.link(source, folder / "link")
    claim = os.open(folder, os.O_RDONLY)
    fcntl.flock(claim, fcntl.LOCK_EX)  # as the command does
    with staged(folder) as stage:
        os.link(source, stage / "link")
        for name in ("a", "config.json", "z"):
            (stage / name).touch()
        assert [path.name for path in folder.iterdir() if path != stage] == ["link"]
    assert sorted(path.name for path in folder.iterdir()) == ["a", "config.json", "link", "z"]
    assert order[-1] == "config.json"
    os.close(claim)


def test_errors_leave_no_files(tmp_path):
    def fail():
        with staged(tmp_path) as stage:
            (stage / "config.json").touch()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert not any(tmp_path.iterdir())
