"""The cache folder of downloads and converted weights, one per user."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbatch.errors import refuse
from specbatch.files.atomic_file import scratch_folder
from specbatch.files.text_files import open_regular


def cache_folder() -> Path:
    """`$SPECBATCH_CACHE`, else `~/.cache/specbatch`. It need not exist yet."""
    chosen = os.environ.get("SPECBATCH_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "specbatch"


def file_hash(path: Path) -> str:
    """sha256 of a whole regular file, as hex. Raises UnreadableError, or OSError while it is read."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def staging(needed: int) -> Iterator[Path]:
    """A temporary folder on the cache's disk, from which finished files are renamed to their place. Those of killed
    processes are removed.

    Raises SpecbatchError if the cache cannot be written or has fewer than `needed` bytes free.
    """
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise refuse("SPECBATCH_CACHE", str(root), f"set it to a folder that can be written ({error})") from None
    with scratch_folder(root) as scratch:
        free = shutil.disk_usage(root).free
        if free < needed:
            works = f"set it to a folder with {needed / 2**30:.1f} GiB free (here {free / 2**30:.1f})"
            raise refuse("SPECBATCH_CACHE", str(root), works)
        yield scratch


def keep(scratch: Path, target: Path) -> None:
    """Rename a finished file or folder to its place. If another process was faster, its result stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(scratch, target)
    except OSError:
        if not target.exists():
            raise
