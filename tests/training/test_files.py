"""A head's files appear together."""

from __future__ import annotations

import os

import pytest

from specbatch.training.files import staged


def test_files_appear_once_all_are_written(tmp_path):
    """Over what a crash has left: links to the same file, and half of another."""
    folder, source = tmp_path / "head", tmp_path / "source"
    (folder / ".unfinished").mkdir(parents=True)
    (folder / ".unfinished" / ".part7").touch()
    source.touch()
    os.link(source, folder / "link")
    with staged(folder) as stage:
        os.link(source, stage / "link")
        (stage / "config.json").touch()
        assert not (folder / "config.json").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "link"]


def test_an_error_leaves_nothing(tmp_path):
    def fail():
        with staged(tmp_path) as stage:
            (stage / "config.json").touch()
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert not any(tmp_path.iterdir())
