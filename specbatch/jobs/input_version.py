"""Detects that an input was changed, replaced or removed while a command reads it."""

from __future__ import annotations

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
        if self._is_local:
            path = local_path(self._source)
            return _states([path, *sorted(path.rglob("*"))] if path.is_dir() else [path])
        return version_of(str(self._source)) if is_remote(self._source) else None


def _states(paths: list[Path]) -> list[tuple[int, ...]]:
    """Of the files and folders that are there."""
    found = []
    for path in paths:
        try:
            state = path.stat()
        except (OSError, ValueError):  # it is gone, or no valid path
            continue
        found.append((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))
    return found
