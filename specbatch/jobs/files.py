"""Opens input files and stores output files, on the local disk or through fsspec on an object store (s3://, gs://)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import refuse
from specbatch.files.text_files import UnreadableError, open_regular

_LOCAL = "file://"


def is_remote(path: str | Path) -> bool:
    """Whether a path has a scheme other than file://."""
    return "://" in str(path) and not str(path).startswith(_LOCAL)


def local_path(path: str | Path) -> Path:
    return Path(str(path).removeprefix(_LOCAL))


@contextmanager
def open_input(setting: str, source: str | Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes. Raises SpecbatchError if that fails."""
    works = "name a JSONL file, or hf:OWNER/NAME"
    if not is_remote(source):
        try:
            opened: Any = open_regular(local_path(source))
        except UnreadableError as error:
            raise refuse(setting, str(source), f"{error}; {works}") from error
    else:
        files = _filesystem(setting, str(source))
        try:
            opened = files.open(str(source), "rb")
        except Exception as error:  # stores have no common base class of errors
            raise _unreachable(setting, str(source), error, works) from error
    with opened:
        yield opened


def exists(setting: str, path: str) -> bool:
    """Whether there is a file at the URL. Raises SpecbatchError if its store cannot be reached."""
    try:
        return bool(_filesystem(setting, path).exists(path))
    except OSError as error:
        raise _unreachable(setting, path, error, "name another file") from error


def version_of(url: str) -> str | None:
    """What changes with the contents of a file on a store; None where the store cannot tell."""
    try:
        files = _filesystem("input", url)
        files.invalidate_cache()
        return str(files.ukey(url))
    except Exception:  # stores have no common base class of errors; whoever reads the file reports them
        return None


def upload(setting: str, path: Path, target: str) -> None:
    """Copy a local file to a URL. Raises SpecbatchError if that fails."""
    files = _filesystem(setting, target)
    try:
        with path.open("rb") as content, files.open(target, "wb") as file:
            shutil.copyfileobj(content, file, 1 << 22)
    except Exception as error:
        raise _unreachable(setting, target, error, "run the same command again to retry") from error


def remove(setting: str, path: str) -> None:
    """Remove the file at a URL if there is one."""
    files = _filesystem(setting, path)
    if files.exists(path):
        files.rm(path)


def _filesystem(setting: str, url: str) -> Any:
    """The fsspec file system of a URL. Raises SpecbatchError for an unknown scheme and one whose package is missing."""
    import fsspec

    scheme = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise refuse(setting, url, f"{scheme}:// needs another package ({reason}), for example with pip") from error
    except ValueError as error:
        raise refuse(
            setting, url, f"fsspec does not support {scheme}://; name a file, or a URL such as s3://..."
        ) from error
    except Exception as error:  # credentials, for example
        raise _unreachable(setting, url, error, "check the credentials of the store") from error


def _unreachable(setting: str, url: str, error: Exception, works: str) -> Exception:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if isinstance(error, FileNotFoundError):
        reason = "No such file"
    return refuse(setting, url, f"the store reports: {reason}; {works}")
