"""Atomic replacement of files and folders: readers see the old contents or the complete new ones.

Temporary files and folders are beside the path that they replace: FILE.specbatch-part-0123456789abcdef is being
written, FOLDER.specbatch-old-0123456789abcdef is being replaced. Half of the digits are random. The other half is a
checksum of them and of FILE: a file of a user, or one that was renamed, has another one and is never removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PART, _OLD = "part", "old"
_TEMPORARY = re.compile(
    r"(?P<name>.*)\.specbatch-(?P<kind>part|old)-(?P<drawn>[0-9a-f]{8})(?P<check>[0-9a-f]{8})", re.S
)


class UnwritableError(OSError):
    """A file or folder cannot be written. `filename` is its path, `strerror` the reason."""

    def __str__(self) -> str:
        return f"{self.filename} cannot be written ({self.strerror})"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UnwritableError for `path` in place of another OSError, and for a path that no file can have."""
    try:
        yield
    except UnwritableError:
        raise
    except OSError as error:
        raise UnwritableError(error.errno, error.strerror or str(error), str(path)) from error
    except ValueError as error:
        if "embedded null" not in str(error) and not isinstance(error, UnicodeEncodeError):
            raise
        raise UnwritableError(0, "not a valid path", str(path)) from error


@contextmanager
def replacing(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, an empty file or folder, which replaces `path` if the block succeeds.

    What killed processes left of the same path is removed first: the temporary file is locked while its writer lives.
    Raises UnwritableError; `path` is then as before.
    """
    with writing(path):
        remove_leftovers(path)
        part = temporary_path(path)
        if folder:
            part.mkdir()
        locked = _locked(part, os.O_RDONLY if folder else os.O_RDONLY | os.O_CREAT)
        try:
            yield part
            if not folder:
                _sync(part)
            _replace(part, path)
        finally:
            os.close(locked)
            _remove(part)


def temporary_path(path: Path, kind: str = _PART) -> Path:
    """A new name beside `path` for what replaces it ("part") or for what it was ("old")."""
    return path.parent / _temporary_name(path.name, kind)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace the contents of a file. Raises UnwritableError."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of a value as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2) + "\n")


def remove_leftovers(path: Path) -> None:
    """Remove temporary files and folders of `path` whose process was killed. A folder that it had moved away to replace
    it is moved back if the new one is missing."""
    if path.parent.is_dir():
        _remove_leftovers(path.parent, path.name)


def _remove_leftovers(folder: Path, name: str) -> None:
    for left in folder.iterdir():
        found = _parts(left)
        if found and found["name"] == name and not _is_locked(left):
            if found["kind"] == _OLD and not (folder / name).exists():
                os.replace(left, folder / name)
            else:
                _remove(left)


def is_leftover(path: Path) -> bool:
    """Whether it is a temporary file or folder of this module, by its name."""
    return _parts(path) is not None


def remove_all_leftovers(folder: Path) -> None:
    """`remove_leftovers` of everything below a folder of results."""
    for left in list(folder.rglob("*")):
        if (found := _parts(left)) and left.parent.is_dir():
            _remove_leftovers(left.parent, found["name"])


@contextmanager
def scratch_folder(root: Path, *, claimed: bool = False) -> Iterator[Path]:
    """A temporary folder in `root`, an existing folder, that is removed at the end. Those of killed processes are
    removed first. claimed: this process has locked `root`. Raises UnwritableError."""
    with writing(root):
        guard = None if claimed else _locked(root, os.O_RDONLY)
        try:
            _remove_leftovers(root, "")
            made = root / _temporary_name("", _PART)
            made.mkdir()
            locked = _locked(made, os.O_RDONLY)
        finally:
            if guard is not None:
                os.close(guard)
    try:
        yield made
    finally:
        _remove(made)
        os.close(locked)


def _replace(part: Path, path: Path) -> None:
    if not (part.is_dir() and path.is_dir() and any(path.iterdir())):
        os.replace(part, path)
        return
    old = temporary_path(path, _OLD)  # a folder cannot replace a non-empty one in one step
    os.replace(path, old)
    try:
        os.replace(part, path)
    except BaseException:
        os.replace(old, path)
        raise
    _remove(old)


def _temporary_name(name: str, kind: str) -> str:
    drawn = secrets.token_hex(4)
    return f"{name}.specbatch-{kind}-{drawn}{_checksum(name, kind, drawn)}"


def _checksum(*parts: str) -> str:
    return hashlib.blake2b(b"\0".join(map(os.fsencode, parts)), digest_size=4).hexdigest()


def _parts(path: Path) -> re.Match[str] | None:
    """The parts of the name if `_temporary_name` made it."""
    found = _TEMPORARY.fullmatch(path.name)
    return found if found and _checksum(*found.group("name", "kind", "drawn")) == found["check"] else None


def _locked(path: Path, flags: int) -> int:
    """A locked descriptor of `path`, which `remove_leftovers` of another process may remove before it is locked."""
    while True:
        found = os.open(path, flags, 0o666)
        try:
            fcntl.flock(found, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(found), path.stat()):
                return found
        except BaseException:
            os.close(found)
            raise
        os.close(found)


def _is_locked(path: Path) -> bool:
    try:
        found = os.open(path, os.O_RDONLY)
    except OSError:  # it has just been removed, or is someone else's
        return True
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(found)
    return False


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
