"""Detects that an input was changed, replaced or removed while a command reads it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specbatch.errors import ChangedError, shown
from specbatch.jobs.files import is_remote, local_path, version_of

HUB = "hf:"


class InputVersion:
    """An input as it was first seen. A job that reads it several times takes the same one for all passes.

    A local file is known by its device, inode, size and time of modification, a folder by those of all its files, and a
    file on an object store by what fsspec calls its unique key. Data sets of the hub are read from a cache that does
    not change.
    """

    def __init__(self, setting: str, source: str | Path) -> None:
        self._setting, self._source = setting, source
        self._is_local = not is_remote(source) and not str(source).startswith(HUB)
        self._path = local_path(source)
        self._is_folder = self._is_local and self._path.is_dir()
        self._name = str(self._path)
        self._first = self._now()

    def check(self, *, remote: bool = False) -> None:
        """Raises ChangedError if the input has changed. remote: ask an object store, too, over the network."""
        if not self._is_local and not remote:
            return
        if (now := self._now()) != self._first:
            what = "changed" if now else "was removed"
            works = "put back what it was to continue, or start again with another output"
            line = f"{self._setting}={shown(str(self._source))}: {what} while it was read; {works}"
            raise ChangedError(line, setting=self._setting, value=str(self._source), works=works)

    def _now(self) -> Any:
        if not self._is_local:
            return version_of(str(self._source)) if is_remote(self._source) else None
        if self._is_folder:
            return [state for path in sorted(self._path.rglob("*")) if (state := _state(str(path)))]
        return _state(self._name)


def _state(path: str) -> tuple[int, ...]:
    """Of the file or folder; empty if there is none."""
    try:
        found = os.stat(path)  # called for every row
    except (OSError, ValueError):  # it is gone, or no valid path
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
